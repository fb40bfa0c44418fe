"""Packaging. TensorFlow is not a requirement, because it has several names:
mp_compat/_tensorflow checks for it.
"""

import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).resolve().parent

setuptools.setup(
  name="mp_compat",
  version=re.search(
    r'^__version__ = "(.+)"$', (HERE / "mp_compat/__init__.py").read_text("utf-8"), re.M
  ).group(1),
  description="Loss scaling for TensorFlow's graph mode, for TensorFlow 1.15 to 2.21",
  long_description=(HERE / "README.md").read_text("utf-8"),
  long_description_content_type="text/markdown",
  maintainer="The mp_compat maintainers",
  license="Apache-2.0",
  keywords=[
    "tensorflow",
    "mixed precision",
    "float16",
    "loss scaling",
    "horovod",
    "estimator",
  ],
  classifiers=[
    "Development Status :: 4 - Beta",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: OS Independent",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3 :: Only",
  ]
  + ["Programming Language :: Python :: 3.{}".format(minor) for minor in range(7, 14)]
  + [
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
  ],
  packages=setuptools.find_packages(include=["mp_compat", "mp_compat.*"]),
  package_data={"mp_compat": ["*.pyi", "py.typed"]},
  python_requires=">=3.7",
  entry_points={"console_scripts": ["mp_compat = mp_compat.__main__:main"]},
  extras_require={
    "demo": ["absl-py", "matplotlib", "numpy", "scikit-learn", "tqdm"],
    "migrate": ["libcst", "tqdm"],
    "ranges": ["matplotlib"],
    "test": ["absl-py", "hypothesis", "pytest", "pytest-cov", "pytest-xdist"],
  },
)
