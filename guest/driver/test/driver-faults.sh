# SPDX-License-Identifier: GPL-2.0
#
# Part of driver-test.sh: the stage in which allocations fail, one after the other, on a kernel with
# fault injection. Nothing half done is left, and the next try succeeds.

readonly INJECT='
cd /sys/kernel/debug || exit 1
for attr in failslab fail_page_alloc; do
	echo 0 >$attr/verbose && echo N >$attr/ignore-gfp-wait || exit 1
done
echo N >fail_page_alloc/ignore-gfp-highmem && echo 0 >fail_page_alloc/min-order
'

# In the guest, with the driver unloaded: FILE MODE SECONDS TOOL. In each round an allocation of a load
# fails, in the next one an allocation of an unload. First those of the driver itself, in an order that
# leaves no gap if there is no time for all of them, then those before it begins: how many these are is
# seen from a load that it refuses at once. Lines that begin with FAIL are wrong.
readonly LOADS='
file=$1 mode=$2 tool=$4
end=$(($(cut -d. -f1 /proc/uptime) + $3))

remains() {
	grep -s "^vnuma " /proc/modules
	ls -d /dev/vnuma /sys/class/misc/vnuma /sys/bus/pci/drivers/vnuma /sys/module/vnuma 2>/dev/null
	grep vnuma /proc/interrupts /proc/iomem
	grep vnuma /sys/kernel/debug/kprobes/list /sys/devices/system/cpu/hotplug/states
	# What code that is gone has allocated has no name any more.
	awk "\$3 ~ /^0x/" /proc/vmallocinfo
}

# $1: what was done.
nothing_is_left() {
	left=$(remains)
	[ -z "$left" ] || echo "FAIL: $1, left: $left"
}

# In $error what the call came to, in $left what was left until the allocation that was to fail.
faulty() {
	said=$($tool "$@" 2>&1)
	case $said in
	*[!0-9\ ]* | "") echo "FAIL: $*: $said"; exit 1 ;;
	esac
	error=${said% *} left=${said#* }
}

faulty load $file 1000000 mode=$mode
loads=$((1000000 - left))
faulty unload vnuma 1000000
unloads=$((1000000 - left))
nothing_is_left "without a fault"
faulty load $file 1000000 mode=refused
[ $error = 22 ] || echo "FAIL: mode=refused: error $error"
before=$((1000000 - left)) own=$((loads - 1000000 + left))
[ $own -gt 0 ] || echo "FAIL: $loads allocations of a load, $before of one that is refused"
tried=0 refused=0 unbound=0
while [ $tried -lt $loads ] && [ $(cut -d. -f1 /proc/uptime) -lt $end ]; do
	# Prime, and no factor of these numbers.
	nth=$((before + tried * 7919 % own + 1))
	[ $tried -lt $own ] || nth=$((loads - tried))
	faulty load $file $nth mode=$mode
	case $error in
	0)
		test -e /sys/bus/pci/drivers/vnuma/0* || unbound=$((unbound + 1))
		rmmod vnuma || echo "FAIL: load, allocation $nth: rmmod"
		nothing_is_left "unloaded after allocation $nth"
		;;
	# 22: module_add_driver() says so of a folder that it has no memory for.
	12 | 17 | 22 | 95)
		refused=$((refused + 1))
		nothing_is_left "load, allocation $nth, error $error"
		;;
	*) echo "FAIL: load, allocation $nth: error $error" ;;
	esac
	if [ $tried -lt $unloads ]; then
		nth=$((tried * 7919 % unloads + 1))
		insmod $file mode=$mode || echo "FAIL: insmod"
		faulty unload vnuma $nth
		[ $error = 0 ] || echo "FAIL: unload, allocation $nth: error $error"
		nothing_is_left "unload, allocation $nth"
	fi
	tried=$((tried + 1))
done
echo "faults: $tried of $loads allocations of a load, $own of them by the driver itself: $refused times not loaded, $unbound times without the device"
echo "faults: $((tried < unloads ? tried : unloads)) of $unloads allocations of an unload"
'

# Each allocation of loading, probing and the first update, and each of unloading.
faults_load() {
	local said
	guest rmmod vnuma || fail rmmod
	strict=	# /dev/vnuma is gone
	said=$(guest sh -c "$LOADS" faults "$MODULE" "$MODE" "$READ_S" "$FAULTS" | tr -d '\r')
	echo "$said"
	[[ $said != *FAIL:* && $said == *"of an unload" ]] || fail "faults of loads"
	check_now "after faults of loads"
	load "$MODE"
	random_move
	publish "$map"
	check_now "loaded after faults"
}

kernel_distances() {
	guest sh -c 'cat /sys/devices/system/node/node*/distance' | tr -d '\r'
}

# Publishes $map while allocation $2 of the thread $1 fails. Leaves in $rejected whether it was refused
# first, in $answer what came last, in $left 0 if there was such an allocation.
update_without() {
	local before after
	before=$(refused)
	after=$before
	host "write $map"
	host "timeout 2000"
	guest sh -c "echo $2 >/proc/$1/fail-nth"
	host ring-await
	while [[ $answer == silent* ]] && ((after == before && SECONDS < until + 600)); do
		after=$(refused)
		((after > before)) || host await
	done
	rejected=$((after > before))
	left=$(guest sh -c "cat /proc/$1/fail-nth; echo 0 >/proc/$1/fail-nth" | tr -d '\r')
}

# Each allocation of updates, which run in the thread of the interrupt.
faults_update() {
	local nth thread distances answered rejected left none=0 times=0 refusals=0
	local until=$((SECONDS + READ_S)) all="the first"
	thread=$(guest sh -c 'pgrep "irq/.*vnuma"' | tr -d '\r')
	[[ $thread ]] || { fail "no thread of the interrupt"; return; }
	distances=$(kernel_distances)
	for ((nth = 1; none < 3 && SECONDS < until; nth++)); do
		((nth % 2)) || set_distances $((20 + nth))
		random_move
		update_without "$thread" "$nth"
		((left)) && none=$((none + 1)) || { none=0; times=$((times + 1)); }
		answered=$answer
		host "timeout 50000"
		if ((rejected)); then
			refusals=$((refusals + 1))
			# All is what it was.
			[[ $(kernel_distances) == "$distances" ]] ||
				fail "allocation $nth of an update failed, and distances have changed"
			((refusals % 4 > 1)) || check_now "allocation $nth of an update failed"
			host ring-await
			answered=$answer
		fi
		[[ $answered == acknowledged* ]] || fail "after allocation $nth of an update: $answered"
		present=$map
		distances=$(kernel_distances)
		((nth % 4)) || check_now "after allocation $nth of an update"
	done
	check_now "after faults of updates"
	((none == 3)) && all=all
	echo "faults: $all $times allocations of updates, $refusals publications were refused first"
}

faults() {
	guest sh -c "$INJECT" || { fail "this kernel injects no faults"; return; }
	[[ $MODE == safe ]] || faults_update
	faults_load
}
