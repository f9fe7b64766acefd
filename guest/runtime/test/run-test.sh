#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# vnuma-run on programs of all kinds: run-test.sh BUILD LIBNUMA JEMALLOC MIMALLOC, with vnuma-run and its libraries in BUILD.
set -eu
build=$(realpath "$1")
real=$2
run=$build/vnuma-run
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
# dash does nothing on EXIT when a signal ends it, and programs here are set-user-ID root.
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
unset LD_PRELOAD JAVA_TOOL_OPTIONS JDK_JAVA_OPTIONS _JAVA_OPTIONS

fail() {
	echo "vnuma-run: $1" >&2
	cat "$dir/out" "$dir/err" >&2
	exit 1
}

# try STATUS ARGUMENT...: output in out and err
try() {
	expected=$1
	shift
	status=0
	"$run" --libraries "$build" "$@" >"$dir/out" 2>"$dir/err" || status=$?
	[ "$status" = "$expected" ] || fail "status $status, not $expected: $*"
}

says() {
	grep -qF -- "$2" "$dir/$1" || fail "$1 does not say: $2"
}

is_silent_on() {
	! grep -qF -- "$2" "$dir/$1" || fail "$1 says: $2"
}

preload="LD_PRELOAD=$build/numa/libnuma.so.1"

# What is planned is printed, and it is what happens.
try 0 --dry-run sh -c true
says out "$preload"
says out 'sh -c true'
# shellcheck disable=SC2016 # of the shell that is started
try 0 sh -c 'echo "LD_PRELOAD=$LD_PRELOAD"; cat /proc/self/maps'
says out "$preload"
says out "r-xp"
grep -q "$build/numa/libnuma.so.1" "$dir/out" || fail "it is not loaded"
grep -q "$(realpath "$real")" "$dir/out" || fail "the real libnuma is not loaded"
try 42 sh -c 'exit 42'

# A folder of libraries below this one is the same for a program that is in another one.
(cd "$build" && "$run" --libraries . sh -c 'cd / && cat /proc/self/maps' >"$dir/out" 2>"$dir/err")
grep -q "$build/numa/libnuma.so.1" "$dir/out" || fail "it is not loaded from another folder"
is_silent_on err 'cannot be preloaded'
(cd "$dir" && "$run" --libraries none --dry-run true >"$dir/out" 2>"$dir/err")
says err 'vnuma-run: none/numa/libnuma.so.1: No such file or directory'

# What is there stays, behind it.
LD_PRELOAD=/nonexistent.so try 0 --dry-run true
says out "$preload:/nonexistent.so"

# Java.
JAVA_TOOL_OPTIONS=-Xmx1g try 0 --gc parallel --dry-run true
says out "LD_PRELOAD=$build/hotspot/libnuma.so.1"
says out 'JAVA_TOOL_OPTIONS=-XX:+UseParallelGC -XX:+UseNUMA -Xmx1g'
try 0 --gc g1 --dry-run true
says out "LD_PRELOAD=$build/hotspot/libnuma.so.1"
says out 'JAVA_TOOL_OPTIONS=-XX:+UseG1GC -XX:+UseNUMA'
says out 'VNUMA_NODE_PER_CPU=1'
is_silent_on out VNUMA_SHARED_CPUS
VNUMA_NODE_PER_CPU=0 try 0 --gc g1 --dry-run true
is_silent_on out 'VNUMA_NODE_PER_CPU=1'
try 0 --gc z --dry-run true
says out 'JAVA_TOOL_OPTIONS=-XX:+UseZGC -XX:+UseNUMA'
says out 'VNUMA_SHARED_CPUS=1'
is_silent_on out VNUMA_NODE_PER_CPU
VNUMA_SHARED_CPUS=0 try 0 --gc z --dry-run true
is_silent_on out VNUMA_SHARED_CPUS
try 125 --gc serial true
says err '--gc serial: only parallel, g1 and z are known'

# One that is told of another collector: it would refuse to start with two.
is_left() {
	says err "vnuma-run: $1, and a Java VM that is told of two does not start: it is left as it is"
	says out "$preload"
	is_silent_on out JAVA_TOOL_OPTIONS
	is_silent_on out VNUMA_
}
is_followed() {
	says out "LD_PRELOAD=$build/hotspot/libnuma.so.1"
	says out "JAVA_TOOL_OPTIONS=-XX:+Use$1GC -XX:+UseNUMA"
	is_silent_on err collector
}
for name in Serial G1 Z Shenandoah Epsilon ConcMarkSweep ParNew New; do
	try 0 --gc parallel --dry-run true -Xmx1g "-XX:+Use${name}GC" Main
	is_left "-XX:+Use${name}GC: another collector than --gc parallel"
done
for gc in g1 z; do
	try 0 --gc $gc --dry-run true -XX:+UseParallelGC
	is_left "-XX:+UseParallelGC: another collector than --gc $gc"
	try 0 --gc $gc --dry-run true -XX:+AggressiveHeap
	is_left "-XX:+AggressiveHeap: another collector than --gc $gc"
done
for variable in JAVA_TOOL_OPTIONS JDK_JAVA_OPTIONS _JAVA_OPTIONS; do
	export "$variable=-Xmx1g -XX:+UseZGC"
	try 0 --gc g1 --dry-run true
	is_left "-XX:+UseZGC in $variable: another collector than --gc g1"
	export "$variable=-Xmx1g -XX:+UseG1GC"
	try 0 --gc g1 --dry-run true -XX:+UseG1GC
	is_followed G1
	unset "$variable"
done
try 0 --gc z --dry-run sh -c 'java "-XX:+UseG1GC"; exit 0'
is_left '-XX:+UseG1GC: another collector than --gc z'
try 0 --gc z --dry-run true -J-XX:+UseSerialGC Main.java
is_left '-XX:+UseSerialGC: another collector than --gc z'
# Of Java 8.
for option in -Xconcgc -Xincgc; do
	try 0 --gc parallel --dry-run true -Xmx1g $option Main
	is_left "$option: another collector than --gc parallel"
	_JAVA_OPTIONS=$option try 0 --gc g1 --dry-run true
	is_left "$option in _JAVA_OPTIONS: another collector than --gc g1"
	for back in -Xnoconcgc -Xnoincgc -XX:-UseConcMarkSweepGC; do
		try 0 --gc parallel --dry-run true $option $back
		is_followed Parallel
		try 0 --gc parallel --dry-run true $back $option
		is_left "$option: another collector than --gc parallel"
	done
done
try 0 --gc parallel --dry-run true -XX:+UseConcMarkSweepGC -Xnoconcgc
is_followed Parallel
# The last one counts, in the order in which a Java VM reads them.
try 0 --gc parallel --dry-run true -XX:+UseG1GC -XX:+UseZGC -XX:-UseG1GC
is_left '-XX:+UseZGC: another collector than --gc parallel'
try 0 --gc parallel --dry-run true -XX:+UseG1GC -XX:+UseZGC -XX:-UseG1GC -XX:-UseZGC
is_followed Parallel
JAVA_TOOL_OPTIONS=-XX:+UseG1GC try 0 --gc parallel --dry-run true -XX:-UseG1GC
is_followed Parallel
JDK_JAVA_OPTIONS=-XX:+UseG1GC try 0 --gc parallel --dry-run true -XX:-UseG1GC
is_followed Parallel
_JAVA_OPTIONS=-XX:+UseG1GC try 0 --gc parallel --dry-run true -XX:-UseG1GC
is_left '-XX:+UseG1GC in _JAVA_OPTIONS: another collector than --gc parallel'
# What does not choose one, or the same one.
try 0 --gc parallel --dry-run true -XX:+UseParallelGC -XX:+UseParallelOldGC -XX:+AggressiveHeap
is_followed Parallel
try 0 --gc z --dry-run true -XX:+UseNUMA -XX:+UseMaximumCompactionOnSystemGC -XX:+UseGCOverheadLimit -XX:-UseG1GC \
	-Xnoconcgc -X -Xnoclassgc -Xconc -XX:+UseG1GCs -XX: -XX:+ -XX:+GC -XX:UseG1GC "-XX:+Use$(printf '%0100d' 0)GC"
is_followed Z
try 0 --dry-run true -XX:+UseG1GC
is_silent_on err collector
# It is started as it would have been.
# shellcheck disable=SC2016 # of the shell that is started
JAVA_TOOL_OPTIONS=-Xmx1g try 0 --gc parallel sh -c 'echo "[$JAVA_TOOL_OPTIONS] $1"' sh -XX:+UseG1GC
says out '[-Xmx1g] -XX:+UseG1GC'
if java -Xmx64m -XX:+UseSerialGC -version >"$dir/out" 2>"$dir/err"; then
	try 0 --gc parallel java -Xmx64m -XX:+UseSerialGC -version
	try 0 --gc parallel java -Xmx64m -XX:+UseParallelGC -version
	says err 'Picked up JAVA_TOOL_OPTIONS: -XX:+UseParallelGC -XX:+UseNUMA'
else
	echo "vnuma-run: skipped without java: a Java VM with another collector"
fi

# A Java VM that looks up nothing of what the overlay answers, or only some of it.
mkdir -p "$dir/jdk/bin" "$dir/jdk/lib/server"
cp /bin/true "$dir/jdk/bin/java"
ln -s "$dir/jdk/bin/java" "$dir/java"
for names in '' 'libnuma.so.1 numa_node_to_cpus' 'sched_getcpu numa_node_to_cpus'; do
	{ head -c 65530 /dev/zero; printf '%s' "$names"; } >"$dir/jdk/lib/server/libjvm.so"
	try 0 --gc parallel --dry-run "$dir/java"
	says err "$dir/jdk/lib/server/libjvm.so: unknown layout, it does not look up "
	says out "$preload"
	is_silent_on out JAVA_TOOL_OPTIONS
done
{ head -c 65530 /dev/zero; printf 'libnuma.so.1 numa_node_to_cpus sched_getcpu'; } >"$dir/jdk/lib/server/libjvm.so"
try 0 --gc parallel --dry-run "$dir/java"
is_silent_on err 'unknown layout'
says out 'JAVA_TOOL_OPTIONS=-XX:+UseParallelGC -XX:+UseNUMA'

# Allocators.
jemalloc=$3
try 0 --allocator jemalloc --dry-run true
if [ -e "$jemalloc" ]; then
	says out "$preload:$build/jemalloc/libvnuma-jemalloc.so"
	try 0 --allocator jemalloc cat /proc/self/maps
	grep -q "$build/jemalloc/libvnuma-jemalloc.so" "$dir/out" || fail "malloc() is not ours"
	grep -q "$(realpath "$jemalloc")" "$dir/out" || fail "jemalloc is not loaded"
else
	says out "$preload"
	says err "$jemalloc: No such file or directory: malloc() is the program's own"
fi
mimalloc=$4
try 0 --allocator mimalloc --dry-run true
if [ -e "$mimalloc" ]; then
	says out "$preload:$build/mimalloc/libvnuma-mimalloc.so:$mimalloc"
	is_silent_on out MIMALLOC_
	try 0 --allocator mimalloc cat /proc/self/maps
	grep -q "$build/mimalloc/libvnuma-mimalloc.so" "$dir/out" || fail "malloc() is not ours"
	grep -q "$(realpath "$mimalloc")" "$dir/out" || fail "mimalloc is not loaded"
	"$run" --libraries "$dir/none" --allocator mimalloc --dry-run true >"$dir/out" 2>"$dir/err"
	is_silent_on out LD_PRELOAD
	says err "$dir/none/mimalloc/libvnuma-mimalloc.so: No such file or directory: malloc() is the program's own"
else
	says out "$preload"
	says err "$mimalloc: No such file or directory: malloc() is the program's own"
	is_silent_on out libvnuma-mimalloc
fi
# It takes minutes to build, and is left out by make. Whether it works is looked at in a guest.
cp -r "$build/numa" "$dir/numa"
mkdir "$dir/tcmalloc"
: >"$dir/tcmalloc/libvnuma-tcmalloc.so"
"$run" --libraries "$dir" --allocator tcmalloc --dry-run true >"$dir/out" 2>"$dir/err"
says out "LD_PRELOAD=$dir/numa/libnuma.so.1:$dir/tcmalloc/libvnuma-tcmalloc.so"
says out 'GLIBC_TUNABLES=glibc.pthread.rseq=0'
says out 'TCMALLOC_NUMA_AWARE=1'
GLIBC_TUNABLES=glibc.malloc.check=0 TCMALLOC_NUMA_AWARE=strict-binding \
	"$run" --libraries "$dir" --allocator tcmalloc --dry-run true >"$dir/out" 2>"$dir/err"
says out 'GLIBC_TUNABLES=glibc.pthread.rseq=0:glibc.malloc.check=0'
is_silent_on out 'TCMALLOC_NUMA_AWARE'
"$run" --libraries "$dir/none" --allocator tcmalloc --dry-run true >"$dir/out" 2>"$dir/err"
is_silent_on out GLIBC_TUNABLES
says err "$dir/none/tcmalloc/libvnuma-tcmalloc.so: No such file or directory: malloc() is the program's own"
# An allocator that is linked into the program, and a program that uses malloc() only.
cat >"$dir/own.c" <<'EOF'
#include <stddef.h>
static char memory[1 << 20];
static size_t used;
void *malloc(size_t size)
{
	void *here = memory + used;
	used += (size + 15) & ~15UL;
	return here;
}
void free(void *memory)
{
	(void)memory;
}
int main(void)
{
	return !malloc(1);
}
EOF
${CC:-cc} -fno-builtin -o "$dir/own" "$dir/own.c"
for allocator in jemalloc mimalloc tcmalloc; do
	"$run" --libraries "$dir" --allocator $allocator --dry-run "$dir/own" >"$dir/out" 2>"$dir/err"
	says err "$dir/own: it has a malloc() of its own, which no other comes before"
	is_silent_on out $allocator
	"$run" --libraries "$dir" --allocator $allocator --dry-run true >"$dir/out" 2>"$dir/err"
	is_silent_on err 'of its own'
done
"$run" --libraries "$dir" --dry-run "$dir/own" >"$dir/out" 2>"$dir/err"
is_silent_on err 'of its own'
echo "#!$dir/own" >"$dir/script-of-own"
chmod +x "$dir/script-of-own"
"$run" --libraries "$dir" --allocator tcmalloc --dry-run "$dir/script-of-own" >"$dir/out" 2>"$dir/err"
says err "$dir/own: it has a malloc() of its own, which no other comes before"
try 125 --allocator scudo true
says err '--allocator scudo: only jemalloc, mimalloc and tcmalloc are known'

try 125 --nonsense true
says err 'Usage: vnuma-run'
try 125
try 0 --help
says out '--dry-run'

# The manual has the options that there are, and no other.
manual=$(dirname "$0")/../../../docs/vnuma-run.md
"$run" --help | grep -o -- '--[a-z][a-z-]*' | sort -u >"$dir/options"
sed -n '/^## Options/,/^## What/p' "$manual" | grep '^|' | cut -d'|' -f2 |
	grep -o -- '--[a-z][a-z-]*' | sort -u >"$dir/documented"
diff "$dir/options" "$dir/documented" >"$dir/out" || fail "--help and docs/vnuma-run.md have other options"

# Nothing to start.
try 127 "$dir/none"
says err 'No such file'
try 127 vnuma-no-such-program
: >"$dir/plain"
try 126 "$dir/plain"
try 126 --dry-run "$dir"

# Without libraries, or the real one: as it would have run without vnuma-run.
"$run" --libraries "$dir/none" --dry-run true >"$dir/out" 2>"$dir/err"
is_silent_on out LD_PRELOAD
says err "$dir/none/numa/libnuma.so.1: No such file or directory"
mkdir -p "$dir/a b/numa"
cp "$build/numa/libnuma.so.1" "$dir/a b/numa"
"$run" --libraries "$dir/a b" --gc parallel --dry-run true >"$dir/out" 2>"$dir/err"
is_silent_on out LD_PRELOAD
is_silent_on out JAVA_TOOL_OPTIONS
"$run" --libraries "$dir/none" --allocator jemalloc --dry-run true >"$dir/out" 2>"$dir/err"
is_silent_on out LD_PRELOAD
says err "$dir/none/jemalloc/libvnuma-jemalloc.so: No such file or directory: malloc() is the program's own"
"$run" --libraries "$dir/a b" --dry-run true >"$dir/out" 2>"$dir/err"
is_silent_on out LD_PRELOAD
says err 'a colon or a space'

# Scripts are their interpreter.
printf '#! /bin/sh\n' >"$dir/script"
printf '#!%s\n' "$dir/script" >"$dir/script2"
printf '#!%s\n' "$dir/loop" >"$dir/loop"
printf '#!\n' >"$dir/empty"
printf '#!%s' "$dir/script" >"$dir/no-newline"
printf '#!%s\0\n' /bin/sh >"$dir/zero"
{ printf '#!/'; head -c 300 /dev/zero | tr '\0' x; } >"$dir/long"
printf '#!' >"$dir/short"
chmod +x "$dir/script" "$dir/script2" "$dir/loop" "$dir/empty" "$dir/no-newline" "$dir/zero" "$dir/long" "$dir/short"
try 0 --dry-run "$dir/script2"
says out "$preload"
try 0 --dry-run "$dir/loop"
says err 'too many scripts'
is_silent_on out LD_PRELOAD
for script in no-newline zero; do
	try 0 --dry-run "$dir/$script"
	says out "$preload"
done
for script in empty long short; do
	try 0 --dry-run "$dir/$script"
	says err "$script: a script without an interpreter"
	is_silent_on out LD_PRELOAD
done

# Programs that nothing can be preloaded into run without it.
cat >"$dir/static.c" <<'C'
#include <stdlib.h>
int main(void) { return getenv("LD_PRELOAD") ? 1 : 0; }
C
${CC:-cc} -static -o "$dir/static" "$dir/static.c"
try 0 "$dir/static"
says err 'static: statically linked: no library can be preloaded'
head -c 100 "$dir/static" >"$dir/cut"
printf 'text\n' >"$dir/text"
chmod +x "$dir/cut" "$dir/text"
try 0 --dry-run "$dir/cut"
says err 'its program headers are cut off'
try 0 --dry-run "$dir/text"
says err 'neither an ELF file nor a script'
LC_ALL=C sed 's#/lib64/ld-linux-x86-64[.]so[.]2#/lib/ld-musl-x86_64.so.1\x00\x00\x00#' /bin/true >"$dir/musl"
chmod +x "$dir/musl"
try 0 --dry-run "$dir/musl"
says err "musl: its dynamic linker is not glibc's: no library can be preloaded"
is_silent_on out LD_PRELOAD

# Who the dynamic linker distrusts: it says so of itself, and whether the library is there.
cat >"$dir/trust.c" <<'C'
#define _GNU_SOURCE
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

static int is_ours(struct dl_phdr_info *library, size_t size, void *unused)
{
	(void)size;
	(void)unused;
	return strstr(library->dlpi_name, "/numa/libnuma.so.1") != NULL;
}

int main(void)
{
	printf("user %d group %d distrusted %lu preload %d library %d\n", geteuid(), getegid(), getauxval(AT_SECURE),
	       getenv("LD_PRELOAD") != NULL, dl_iterate_phdr(is_ours, NULL));
	return 42;
}
C
${CC:-cc} -o "$dir/trust" "$dir/trust.c"
for kind in setuid setgid caps unreadable setuid-nobody; do
	cp "$dir/trust" "$dir/$kind"
done
chmod 755 "$dir"
cp "$run" "$dir/vnuma-run"

# as_nobody STATUS ARGUMENT...: the same as try, of a user that nothing belongs to
nobody="setpriv --reuid=65534 --regid=65534 --clear-groups"
as_nobody() {
	expected=$1
	shift
	status=0
	$nobody "$dir/vnuma-run" --libraries "$dir" "$@" >"$dir/out" 2>"$dir/err" || status=$?
	[ "$status" = "$expected" ] || fail "status $status, not $expected, as nobody: $*"
}

# What it is, as PROGRAM and as what PROGRAM executes: it runs as it would have, and of the first one it is said.
is_distrusted() {
	as_nobody 42 "$dir/$1"
	says out "$2 distrusted 1 preload 0 library 0"
	says err "vnuma-run: $dir/$1: $3: no library can be preloaded"
	# shellcheck disable=SC2016 # of the shell that is started
	as_nobody 42 sh -c '"$0"; exit $?' "$dir/$1"
	says out "$2 distrusted 1 preload 0 library 0"
	is_silent_on err 'no library can be preloaded'
}

if [ "$(id -u)" != 0 ]; then
	echo "vnuma-run: skipped without root: programs with privileges"
elif ! $nobody test -r "$dir/numa/libnuma.so.1" 2>"$dir/err"; then
	echo "vnuma-run: skipped, nobody cannot read $dir: programs with privileges: $(cat "$dir/err")"
else
	# shellcheck disable=SC2016 # of the shell that is started
	as_nobody 42 sh -c '"$0"; exit $?' "$dir/trust"
	says out 'user 65534 group 65534 distrusted 0 preload 1 library 1'
	chown 65534 "$dir/setuid-nobody"
	chmod 4755 "$dir/setuid" "$dir/setuid-nobody"
	chmod 2755 "$dir/setgid"
	# Its user is who runs it.
	as_nobody 42 "$dir/setuid-nobody"
	says out 'user 65534 group 65534 distrusted 0 preload 1 library 1'
	if $nobody "$dir/setuid" | grep -q 'user 0'; then
		try 42 "$dir/setuid-nobody"
		says out "user 65534 group $(id -g) distrusted 1 preload 0 library 0"
		says err 'setuid-nobody: set-user-ID: no library can be preloaded'
		is_distrusted setuid 'user 0 group 65534' set-user-ID
		is_distrusted setgid "user 65534 group $(id -g)" set-group-ID
	else
		echo "vnuma-run: skipped, $dir is on a file system without them, or no_new_privs is set: set-user-ID and set-group-ID programs"
	fi
	if PATH=$PATH:/usr/sbin:/sbin setcap cap_net_raw+ep "$dir/caps" 2>"$dir/err" && $nobody "$dir/caps" | grep -q 'distrusted 1'; then
		is_distrusted caps 'user 65534 group 65534' 'it has file capabilities'
	else
		echo "vnuma-run: skipped, no setcap, or $dir is on a file system without it: a program with capabilities: $(cat "$dir/err")"
	fi
	chmod 0111 "$dir/unreadable"
	as_nobody 42 "$dir/unreadable"
	says out 'user 65534 group 65534 distrusted 0 preload 0 library 0'
	says err "$dir/unreadable: Permission denied: whether it is dynamically linked is not known"
fi

# Huge pages: with G1 where all memory may have some, unless the Java VM is told which pages to use.
meminfo='HugePages_Total:       0
Hugepagesize:       2048 kB'
with_huge_pages() {
	echo "$1" >"$dir/enabled"
	echo "$meminfo" >"$dir/meminfo"
	shift
	# shellcheck disable=SC2016 # of the shell that is started
	unshare -m sh -euc 'mount --bind "$0/enabled" /sys/kernel/mm/transparent_hugepage/enabled
		mount --bind "$0/meminfo" /proc/meminfo; exec "$@"' \
		"$dir" "$run" --libraries "$build" --gc "$@" >"$dir/out" 2>"$dir/err"
}

if with_huge_pages '[always] madvise never' g1 --dry-run true; then
	flag=-XX:+UseTransparentHugePages
	says out "JAVA_TOOL_OPTIONS=-XX:+UseG1GC -XX:+UseNUMA $flag"
	JAVA_TOOL_OPTIONS=-Xmx1g with_huge_pages '[always] madvise never' g1 --dry-run true -XX:+UseStringDeduplication
	says out "JAVA_TOOL_OPTIONS=-XX:+UseG1GC -XX:+UseNUMA $flag -Xmx1g"
	for gc in parallel z; do
		with_huge_pages '[always] madvise never' $gc --dry-run true
		is_silent_on out $flag
	done
	for enabled in 'always [madvise] never' 'always madvise [never]' ''; do
		with_huge_pages "$enabled" g1 --dry-run true
		is_silent_on out $flag
	done
	with_huge_pages '[always] madvise never' g1 --dry-run true -XX:+UseZGC
	is_silent_on out $flag
	for other in 's/ 0$/ 64/' 's/2048/1048576/' '/Total/d' '/size/d'; do
		before=$meminfo
		meminfo=$(echo "$meminfo" | sed "$other")
		with_huge_pages '[always] madvise never' g1 --dry-run true
		is_silent_on out $flag
		meminfo=$before
	done
	for chosen in -XX:-UseTransparentHugePages -XX:+UseLargePages -XX:+UseHugeTLBFS -XX:+UseSHM -XX:LargePageSizeInBytes=2m \
		-XX:+SegmentedCodeCache -XX:ReservedCodeCacheSize=240m -XX:NonNMethodCodeHeapSize=5m -XX:ProfiledCodeHeapSize=117m \
		-XX:NonProfiledCodeHeapSize=118m; do
		with_huge_pages '[always] madvise never' g1 --dry-run true -Xmx1g $chosen Main
		is_silent_on out $flag
		for variable in JAVA_TOOL_OPTIONS JDK_JAVA_OPTIONS _JAVA_OPTIONS; do
			export "$variable=-Xmx1g $chosen"
			with_huge_pages '[always] madvise never' g1 --dry-run true
			is_silent_on out $flag
			unset "$variable"
		done
	done
else
	echo "vnuma-run: skipped, nothing can be mounted here: huge pages: $(cat "$dir/err")"
fi

# The device. Where mounts are allowed /dev has few files, and that as vnuma which a test puts there.
with_device() {
	# shellcheck disable=SC2016 # of the shell that is started
	unshare -m sh -euc '
		mount -t tmpfs none "$0"
		chmod 755 "$0"
		for name in null zero full random urandom; do
			: >"$0/$name"
			mount --bind "/dev/$name" "$0/$name"
		done
		(cd "$0" && eval "$1")
		mount --rbind "$0" /dev
		shift
		exec "$@"' "$dir/dev" "$@"
}

# reads_sysfs SETUP USER REASON
reads_sysfs() {
	status=0
	# shellcheck disable=SC2086 # a command and its options, or nothing
	with_device "$1" $2 "$dir/vnuma-run" --libraries "$dir" "$dir/trust" >"$dir/out" 2>"$dir/err" || status=$?
	[ "$status" = 42 ] || fail "status $status, not 42, with a device of $1"
	says out 'preload 1 library 1'
	says err "vnuma-run: /dev/vnuma: $3: the topology is read from sysfs"
	for option in '--gc g1: the regions of the heap stay' '--allocator tcmalloc: it keeps the nodes'; do
		# shellcheck disable=SC2086 # an option and its value, and a command with options
		with_device "$1" $2 "$dir/vnuma-run" --libraries "$dir" ${option%%:*} --dry-run "$dir/trust" >"$dir/out" 2>"$dir/err"
		says err "vnuma-run: $option"
	done
}

mkdir "$dir/dev"
cp -r "$build/hotspot" "$dir"
if with_device : true >"$dir/out" 2>"$dir/err"; then
	reads_sysfs : '' 'No such file or directory'
	reads_sysfs ': >vnuma' '' 'No such device'
	reads_sysfs ': >vnuma; mount --bind null vnuma' '' 'cannot be mapped: No such device'
	reads_sysfs ': >vnuma; mount --bind zero vnuma' '' 'magic is 0, not 0x3144474d554e5600'
	if $nobody test -r "$dir/numa/libnuma.so.1" 2>"$dir/err"; then
		reads_sysfs ': >vnuma; chmod 0 vnuma' "$nobody" 'Permission denied'
	else
		echo "vnuma-run: skipped, nobody cannot read $dir: a device that may not be read: $(cat "$dir/err")"
	fi
else
	echo "vnuma-run: skipped, nothing can be mounted here: a device of each kind: $(cat "$dir/err")"
	if [ ! -e /dev/vnuma ]; then
		try 0 true
		says err '/dev/vnuma: No such file or directory: the topology is read from sysfs'
	fi
fi
echo "vnuma-run: programs of all kinds ... ok"
