# Everything goes through xtask (see xtask/src); `cargo xtask help` lists it all.
# Selected like all that xtask builds, so that what they share is built once; `cargo run` cannot do that.
BUILD_XTASK = cargo build --workspace --all-features --bin xtask
XTASK = $(or $(CARGO_TARGET_DIR),target)/debug/xtask

.PHONY: help demo check test deb bench soak lab-shell

help:
	@echo 'make demo             a running VM follows its NUMA topology, an otherwise identical one does not'
	@echo 'make check            format, lints and tests of what has changed, and of what depends on it'
	@echo 'make test             format, lints, unit, property and lab tests'
	@echo 'make deb              Debian packages, in target/deb'
	@echo 'make bench NAME=...   one benchmark (without NAME: list them); FULL=1 for its full form'
	@echo 'make soak             long runs of the property tests, fuzz targets and lab tests; NAME=scheduler, memory, packages, kernel, kernel-users or hostile: that part of them'
	@echo 'make lab-shell        a prompt on the emulated NUMA server'

demo check test deb:
	@scripts/bootstrap.sh
	@$(BUILD_XTASK)
	@$(XTASK) $@

soak:
	@scripts/bootstrap.sh
	@$(BUILD_XTASK)
	@$(XTASK) soak $(NAME)

bench:
	@scripts/bootstrap.sh
	@$(BUILD_XTASK)
	@$(XTASK) bench $(NAME) $(if $(FULL),--full)

lab-shell:
	@scripts/bootstrap.sh
	@$(BUILD_XTASK)
	@$(XTASK) lab shell
