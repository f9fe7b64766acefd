# Everything goes through xtask (see xtask/src); `cargo xtask help` lists it all.
.PHONY: help demo test bench soak lab-shell

help:
	@echo 'make demo             a running VM follows its NUMA topology, an equal one does not'
	@echo 'make test             format, lints, unit, property and lab tests'
	@echo 'make bench NAME=...   one benchmark (without NAME: which there are; FULL=1: its longer form)'
	@echo 'make soak             long runs of the property tests, fuzz targets and lab tests'
	@echo 'make lab-shell        a prompt on the emulated NUMA server'

demo test soak:
	@scripts/bootstrap.sh
	@cargo build --package xtask
	@cargo xtask $@

bench:
	@scripts/bootstrap.sh
	@cargo build --package xtask
	@cargo xtask bench $(NAME) $(if $(FULL),--full)

lab-shell:
	@scripts/bootstrap.sh
	@cargo build --package xtask
	@cargo xtask lab shell
