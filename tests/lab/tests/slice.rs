//! The first slice on real KVM: each test boots the lab and plays a scenario there.
