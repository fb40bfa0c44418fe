"""What moves programs of other libraries and versions here. Private: use `mp_compat.install` and the command line."""
