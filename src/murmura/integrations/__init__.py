"""Other frameworks on murmura. `import murmura` imports none of these modules; each imports its own framework."""
