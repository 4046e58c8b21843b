"""Other frameworks on murmura: each module imports its own. `import murmura` only registers the backend of `c10d`."""
