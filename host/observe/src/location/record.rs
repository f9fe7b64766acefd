//! Records of the BPF program.

use super::{LocationEvent, LocationKind};
use std::mem::{offset_of, size_of};
use vnuma_abi_bpf::{AFFINITY, EXITED, MIGRATED, VcpuEvent};

/// A record of the ring buffer, or `None` if it is too short or of no known kind.
pub fn parse_record(record: &[u8]) -> Option<LocationEvent> {
    let record = record.get(..size_of::<VcpuEvent>())?;
    let word = |offset: usize| Some(u32::from_ne_bytes(record.get(offset..offset + 4)?.try_into().ok()?));
    let time = record.get(offset_of!(VcpuEvent, time_ns)..)?.get(..8)?;
    let kind = match word(offset_of!(VcpuEvent, kind))? {
        MIGRATED => LocationKind::Migrated,
        AFFINITY => LocationKind::AffinityChanged,
        EXITED => LocationKind::Exited,
        _ => return None,
    };
    Some(LocationEvent {
        tid: i32::try_from(word(offset_of!(VcpuEvent, tid))?).ok()?,
        cpu: word(offset_of!(VcpuEvent, cpu))?,
        kind,
        time_ns: u64::from_ne_bytes(time.try_into().ok()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn records_are_read_by_the_layout_of_the_header() {
        let mut record = Vec::new();
        record.extend(7_000_000_001u64.to_ne_bytes());
        for word in [4711u32, MIGRATED, 9, 0] {
            record.extend(word.to_ne_bytes());
        }
        let event = LocationEvent { tid: 4711, cpu: 9, kind: LocationKind::Migrated, time_ns: 7_000_000_001 };
        assert_eq!(parse_record(&record), Some(event));
        assert_eq!(parse_record(&record[..23]), None);
        record[12..16].copy_from_slice(&99u32.to_ne_bytes());
        assert_eq!(parse_record(&record), None);
    }

    proptest! {
        #[test]
        fn any_record_is_survived(record in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = parse_record(&record);
        }
    }
}
