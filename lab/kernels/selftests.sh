#!/bin/sh
# Builds the selftests of sched_ext of a kernel's source in the present folder:
#
#	selftests.sh SOURCE VMLINUX
#
# VMLINUX is the kernel that they run on, whose types they are built with. What is left is `runner`.
set -eu
make -C "$1/tools/testing/selftests/sched_ext" OUTPUT="$PWD" VMLINUX_BTF="$2" CLANG=clang-19 CC=gcc
rm -r build
