"""The number of this version, a semantic one."""

VERSION = "0.1.0"
