"""The numerics of loss scaling: the update rule, the finite check, the conditional. Private."""
