//! Exactly what is printed.

mod common;

use common::{GIB, MIB2, Node, device, free, host, paper, vm};
use vnuma_placement::{
    Placement, Request, place,
    print::{self, Format},
};

/// The VM of the paper with three devices: two on node 0, one without a node.
fn three_devices() -> Placement {
    let mut host = paper();
    host.pci_devices.push(device(4, None));
    place(&free(&host, &[]), &vm(4, 8 * GIB, &[1, 4, 2])).expect("placed").placement
}

/// Two nodes with huge pages, of which the second has no vCPU, and no device.
fn huge() -> Placement {
    let host = host(&[Node("0-3", 64, 600), Node("4-7", 64, 600)], &[]);
    let request = Request { page_bytes: MIB2, ..vm(1, 2 * GIB, &[]) };
    place(&free(&host, &[]), &request).expect("placed").placement
}

#[test]
fn options_of_qemu_and_a_script() {
    let expected = "\
-name a,debug-threads=on
-machine q35 -accel kvm -cpu host
-smp 4,maxcpus=4,sockets=4,cores=1,threads=1 -m 8192M
-object memory-backend-ram,id=ram0,size=4096M,host-nodes=0,policy=bind
-object memory-backend-ram,id=ram1,size=4096M,host-nodes=1,policy=bind
-numa node,nodeid=0,memdev=ram0 -numa cpu,node-id=0,socket-id=0 -numa cpu,node-id=0,socket-id=1
-numa node,nodeid=1,memdev=ram1 -numa cpu,node-id=1,socket-id=2 -numa cpu,node-id=1,socket-id=3
-numa dist,src=0,dst=0,val=10 -numa dist,src=0,dst=1,val=21
-numa dist,src=1,dst=0,val=21 -numa dist,src=1,dst=1,val=10
-device pcie-root-port,id=vnuma0,bus=pcie.0,chassis=127,slot=0
-device pxb-pcie,id=vnuma-pxb0,bus=pcie.0,bus_nr=253,numa_node=0
-device pcie-root-port,id=vnuma-port0,bus=vnuma-pxb0,chassis=128,slot=0 -device vfio-pci,host=0000:01:00.0,bus=vnuma-port0
-device pcie-root-port,id=vnuma-port1,bus=vnuma-pxb0,chassis=129,slot=0 -device vfio-pci,host=0000:02:00.0,bus=vnuma-port1
-device pcie-root-port,id=vnuma-port2,bus=pcie.0,chassis=130,slot=0 -device vfio-pci,host=0000:04:00.0,bus=vnuma-port2
# # Pins the threads of QEMU, which cannot do it itself: sh -s PID < SCRIPT
# pid=${1:?the PID of the QEMU of a}
# pin() {
#     for name in /proc/$pid/task/*/comm; do
#         task=${name%/comm}
#         [ \"$(cat \"$name\")\" = \"CPU $1/KVM\" ] && taskset -c -p \"$2\" \"${task##*/}\" > /dev/null && return
#     done
#     echo \"process $pid has no thread CPU $1/KVM that can be pinned to CPU $2\" >&2
#     exit 1
# }
# taskset -a -c -p 8-9 \"$pid\" > /dev/null || exit 1
# pin 0 0
# pin 1 1
# pin 2 8
# pin 3 9
";
    assert_eq!(print::text(&three_devices(), Format::Qemu), expected);
}

#[test]
fn huge_pages_and_nodes_without_vcpus_for_qemu() {
    let text = print::text(&huge(), Format::Qemu);
    for line in [
        "-object memory-backend-memfd,id=ram0,size=1200M,hugetlb=on,hugetlbsize=2097152,prealloc=on,host-nodes=0,policy=bind\n",
        "-object memory-backend-memfd,id=ram1,size=848M,hugetlb=on,hugetlbsize=2097152,prealloc=on,host-nodes=1,policy=bind\n",
        "-numa node,nodeid=0,memdev=ram0 -numa cpu,node-id=0,socket-id=0\n-numa node,nodeid=1,memdev=ram1\n",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("pxb"), "{text}");
}

#[test]
fn threads_of_the_hypervisor_leave_the_vcpus_at_devices_to_these_if_there_are_others() {
    let devices = three_devices();
    assert_eq!(devices.emulator_cpus().to_string(), "8-9", "not those of guest node 0, which has devices");
    assert_eq!(huge().emulator_cpus(), huge().cpus(), "no devices, and a guest node without vCPUs");
    let alone = place(&free(&paper(), &[]), &vm(1, GIB, &[1])).expect("placed").placement;
    assert_eq!(alone.emulator_cpus(), alone.cpus(), "its only vCPU is at its device");
    assert!(!alone.cpus().is_empty());
}

#[test]
#[expect(clippy::too_many_lines, reason = "what is printed, whole")]
fn a_domain_of_libvirt() {
    let expected = "\
<domain type='kvm'>
  <name>a</name>
  <memory unit='KiB'>8388608</memory>
  <vcpu placement='static'>4</vcpu>
  <cputune>
    <vcpupin vcpu='0' cpuset='0'/>
    <vcpupin vcpu='1' cpuset='1'/>
    <vcpupin vcpu='2' cpuset='8'/>
    <vcpupin vcpu='3' cpuset='9'/>
    <emulatorpin cpuset='8-9'/>
  </cputune>
  <numatune>
    <memory mode='strict' nodeset='0-1'/>
    <memnode cellid='0' mode='strict' nodeset='0'/>
    <memnode cellid='1' mode='strict' nodeset='1'/>
  </numatune>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
  </os>
  <features>
    <acpi/>
    <apic/>
  </features>
  <cpu mode='host-passthrough'>
    <topology sockets='4' cores='1' threads='1'/>
    <numa>
      <cell id='0' cpus='0-1' memory='4194304' unit='KiB'>
        <distances>
          <sibling id='0' value='10'/>
          <sibling id='1' value='21'/>
        </distances>
      </cell>
      <cell id='1' cpus='2-3' memory='4194304' unit='KiB'>
        <distances>
          <sibling id='0' value='21'/>
          <sibling id='1' value='10'/>
        </distances>
      </cell>
    </numa>
  </cpu>
  <devices>
    <controller type='pci' index='0' model='pcie-root'/>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    <controller type='pci' index='1' model='pcie-root-port'/>
    <controller type='pci' index='2' model='pcie-expander-bus'>
      <target busNr='253'>
        <node>0</node>
      </target>
    </controller>
    <controller type='pci' index='3' model='pcie-root-port'>
      <address type='pci' domain='0x0000' bus='0x02' slot='0x00' function='0x0'/>
    </controller>
    <controller type='pci' index='4' model='pcie-root-port'>
      <address type='pci' domain='0x0000' bus='0x02' slot='0x01' function='0x0'/>
    </controller>
    <controller type='pci' index='5' model='pcie-root-port'/>
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <driver name='vfio'/>
      <source>
        <address domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>
      </source>
      <address type='pci' domain='0x0000' bus='0x03' slot='0x00' function='0x0'/>
    </hostdev>
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <driver name='vfio'/>
      <source>
        <address domain='0x0000' bus='0x02' slot='0x00' function='0x0'/>
      </source>
      <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>
    </hostdev>
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <driver name='vfio'/>
      <source>
        <address domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>
      </source>
      <address type='pci' domain='0x0000' bus='0x05' slot='0x00' function='0x0'/>
    </hostdev>
  </devices>
</domain>
";
    assert_eq!(print::text(&three_devices(), Format::Libvirt), expected);
}

#[test]
fn huge_pages_and_nodes_without_vcpus_for_libvirt() {
    let text = print::text(&huge(), Format::Libvirt);
    let pages = "  <memoryBacking>\n    <hugepages>\n      <page size='2048' unit='KiB'/>\n    </hugepages>\n  </memoryBacking>\n";
    assert!(
        text.contains(pages) && text.contains("      <cell id='1' memory='868352' unit='KiB'>\n"),
        "{text}"
    );
}

#[test]
fn json_reads_back_as_the_placement() {
    for placement in [three_devices(), huge()] {
        let text = print::text(&placement, Format::Json);
        assert_eq!(serde_json::from_str::<Placement>(&text).expect("JSON"), placement);
    }
    let error = "yaml".parse::<Format>().expect_err("unknown");
    assert_eq!(error, "format \"yaml\": expected qemu, libvirt or json");
    assert_eq!("libvirt".parse(), Ok(Format::Libvirt));
}

#[test]
fn bridges_of_two_guest_nodes_have_buses_of_their_own() {
    let placement = place(&free(&paper(), &[]), &vm(4, 8 * GIB, &[1, 2, 3])).expect("placed").placement;
    let text = print::text(&placement, Format::Qemu);
    // One bus for a bridge, and one for each of its ports: two devices behind the first, one behind the second.
    for bridge in ["bus_nr=251,numa_node=0", "bus_nr=254,numa_node=1"] {
        assert!(text.contains(bridge), "{bridge} is not in\n{text}");
    }
}
