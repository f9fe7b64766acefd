//! A file of its own, as it counts all descriptors of the process.

use vnuma_abi_topology_channel::Vcpu;
use vnuma_channel::{Channel, Content};
use vnuma_model::DistanceMatrix;

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("listed").count()
}

#[test]
fn channels_that_are_gone_leave_nothing_open() {
    let distances = DistanceMatrix::new(vec![vec![10]]).expect("square");
    let content = Content::new(distances, vec![Vcpu { apic_id: 3, node: 0 }]).expect("within limits");
    // What all channels share is made with the first one and stays.
    drop(Channel::create(7).expect("a channel"));
    let before = open_files();
    for _ in 0..3 {
        let mut channels: Vec<_> = (0..3).map(|_| Channel::create(7).expect("a channel")).collect();
        for (channel, _) in &mut channels {
            channel.publish(&content).expect("published");
        }
        assert!(open_files() > before);
    }
    assert_eq!(open_files(), before);
}
