"""The programs: command line, doctor, simulated hosts, benchmarks, experiments. The library never imports them."""
