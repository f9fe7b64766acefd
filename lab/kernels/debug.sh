#!/bin/sh
# Builds a kernel that checks itself, in the present folder, of the source that Debian has of it:
#
#	debug.sh VERSION RELEASE MIRROR CONFIG...
#
# CONFIG are files with what differs from `make allnoconfig`, PAHOLE the program of that name. What is left
# is `source`, `build`, to build modules with, and `root`, with what modprobe reads.
#
# clang builds it, as gcc has no checks of calls by pointer (CFI).
set -eu
version=$1 release=$2 mirror=$3
shift 3

mkdir -p apt/lists/partial apt/cache/archives/partial source build root
echo "deb $mirror $release main" >apt/sources.list
options="-o Dir::Etc::SourceList=$PWD/apt/sources.list -o Dir::Etc::SourceParts=/dev/null
	-o Dir::State::Lists=$PWD/apt/lists -o Dir::Cache=$PWD/apt/cache -o APT::Sandbox::User=root"
# Several words.
apt-get $options update -qq
(cd apt && apt-get $options download -qq "linux-source-$version")
dpkg --fsys-tarfile apt/linux-source-*.deb | tar -xO "./usr/src/linux-source-$version.tar.xz" |
	tar -xJ -C source --strip-components=1
rm -r apt

build() {
	# The kernel's Makefile takes neither from the environment.
	make -s -C source O="$PWD/build" LLVM=-19 PAHOLE="$PAHOLE" "$@"
}

cat "$@" >build/asked
build KCONFIG_ALLCONFIG="$PWD/build/asked" allnoconfig
# Kconfig drops what depends on something else without a word.
if grep '=y$' build/asked | grep -vxFf build/.config; then
	echo "the kernel does not have the above"
	exit 1
fi
build -j"$(nproc)" vmlinux modules
build INSTALL_MOD_PATH="$PWD/root" modules_install

# Modules are built without these, which are most of it.
find build \( -name '*.o' -o -name '*.a' -o -name '.*.cmd' \) -delete
rm -rf source/Documentation source/drivers/gpu source/sound
