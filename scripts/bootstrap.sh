#!/bin/sh
# Installs what it takes to build xtask: a C compiler and Rust. Where these are there, everything
# else is installed by `cargo xtask setup`. Debian 12, as root. Does nothing when all is there.
set -eu

rust_minor_wanted=90

install() {
	if [ "$(id -u)" -ne 0 ]; then
		echo "bootstrap: run as root, or install these packages: $*" >&2
		exit 1
	fi
	echo "bootstrap: installing $*"
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

rust_is_recent() {
	command -v cargo >/dev/null && command -v rustc >/dev/null || return 1
	minor=$(rustc --version | sed -n 's/^rustc 1\.\([0-9]*\)\..*/\1/p')
	[ "${minor:-0}" -ge "$rust_minor_wanted" ]
}

wanted=
if ! command -v cc >/dev/null; then
	wanted="gcc libc6-dev"
fi
# Debian 12's own `rustc` is too old; `rustc-web` is the one that its browsers are built with.
if ! rust_is_recent; then
	wanted="$wanted ca-certificates cargo-web rustc-web rustfmt-web rust-web-clippy"
fi
if [ -n "$wanted" ]; then
	# What `cargo xtask setup` would install next, in the same call, which saves time.
	cd "$(dirname "$0")/.."
	# shellcheck disable=SC2046,SC2086 # names of packages are words
	install $wanted $(sed 's/#.*//' xtask/host-packages.txt lab/host-packages.txt)
	rust_is_recent || {
		echo "bootstrap: rustc 1.$rust_minor_wanted or newer is needed, found: $(rustc --version)" >&2
		echo "bootstrap: on Debian 12 it is in bookworm-security: is that among apt's sources?" >&2
		exit 1
	}
fi
