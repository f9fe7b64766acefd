//! Parsers of the files: plain functions over text, for fuzzing and tests.

use vnuma_model::{CpuId, CpuSet};

/// Memory of a node or of the host, KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// `MemTotal`.
    pub total_kib: u64,
    /// `MemFree`.
    pub free_kib: u64,
}

/// `/proc/meminfo` (`MemTotal:  N kB`) or a node's `meminfo` (`Node 0 MemTotal:  N kB`).
/// A line that is missing counts as zero.
pub fn meminfo(text: &str) -> Result<Memory, String> {
    let mut memory = Memory::default();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let mut key = words.next();
        if key == Some("Node") {
            key = words.nth(1);
        }
        let field = match key {
            Some("MemTotal:") => &mut memory.total_kib,
            Some("MemFree:") => &mut memory.free_kib,
            _ => continue,
        };
        *field = match (words.next().map(str::parse), words.next()) {
            (Some(Ok(kib)), Some("kB")) => kib,
            _ => return Err(format!("`{}` is no size in kB", vnuma_process::text::sanitize_short(line))),
        };
    }
    Ok(memory)
}

/// Lines `cpuN user nice system idle iowait ...` of `/proc/stat`, in ticks of 10 ms: each CPU's idle time in nanoseconds. A
/// line that is no such line counts for nothing.
pub fn idle_times(text: &str) -> Vec<(CpuId, u64)> {
    const TICK_NS: u64 = 10_000_000;
    let line = |line: &str| {
        let (name, times) = line.split_once(' ')?;
        // The sum of all has no number.
        let cpu = name.strip_prefix("cpu")?.parse().ok().filter(|cpu| *cpu <= CpuSet::MAX_CPU)?;
        let words = times.split_ascii_whitespace();
        let mut ticks = words.skip(3).map_while(|word| word.parse::<u64>().ok());
        let idle = ticks.next()?.saturating_add(ticks.next().unwrap_or(0));
        Some((cpu, idle.saturating_mul(TICK_NS)))
    };
    text.lines().filter_map(line).collect()
}

/// A row of SLIT distances.
pub fn distances(text: &str) -> Result<Vec<u8>, String> {
    let distance = |word: &str| word.parse().map_err(|_| format!("`{word}` is no distance (10 to 255)"));
    text.split_ascii_whitespace().map(distance).collect()
}

/// Size of a cache as the kernel writes it (`32768K`), or with `M` as some copies have it; KiB.
pub fn cache_size_kib(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let (digits, unit) = match text.strip_suffix('M') {
        Some(digits) => (digits, 1024),
        None => (text.strip_suffix('K').unwrap_or(text), 1),
    };
    let value: Option<u64> = digits.parse().ok();
    value.and_then(|value| value.checked_mul(unit)).ok_or_else(|| "not a size such as `512K`".to_owned())
}

/// A mask of CPUs: 32-bit words in hexadecimal, separated by commas, the highest first.
pub fn cpu_map(text: &str) -> Result<CpuSet, String> {
    let words: Vec<&str> = text.trim().split(',').collect();
    let mut set = CpuSet::new();
    for (position, word) in words.iter().rev().enumerate() {
        let plain = (1..=8).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        let bits = plain.then(|| u32::from_str_radix(word, 16).ok()).flatten();
        let mut bits = bits.ok_or("not a mask of hexadecimal words")?;
        while bits != 0 {
            let cpu = u32::try_from(position * 32).unwrap_or(u32::MAX).saturating_add(bits.trailing_zeros());
            if cpu > CpuSet::MAX_CPU {
                return Err(format!("CPU {cpu} is above the largest number, {}", CpuSet::MAX_CPU));
            }
            set.insert(cpu);
            bits &= bits - 1;
        }
    }
    Ok(set)
}

/// A number such as `0x8086`, at most `max`.
pub fn hex(text: &str, max: u32) -> Result<u32, String> {
    let digits = text.trim().strip_prefix("0x").unwrap_or_default();
    let plain = (1..=8).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    plain
        .then(|| u32::from_str_radix(digits, 16).ok())
        .flatten()
        .filter(|&value| value <= max)
        .ok_or_else(|| format!("not a number from 0x0 to {max:#x}"))
}

/// The node of a device: a number, or -1 for none.
pub fn numa_node(text: &str) -> Result<Option<u32>, String> {
    match text.trim().parse::<i32>() {
        Ok(-1) => Ok(None),
        Ok(node) => u32::try_from(node).map(Some).map_err(|_| "neither a node number nor -1".to_owned()),
        Err(_) => Err("neither a node number nor -1".to_owned()),
    }
}

/// `current_link_speed` of a PCIe function, such as `8.0 GT/s PCIe`: megatransfers per second. None: it has no link.
pub fn link_speed(text: &str) -> Result<Option<u32>, String> {
    const MOST_MTS: u32 = 1_000_000;
    let text = text.trim();
    if text.starts_with("Unknown") {
        return Ok(None);
    }
    let expected = || "not a speed such as `8.0 GT/s PCIe`".to_owned();
    let number = text.strip_suffix(" PCIe").unwrap_or(text).strip_suffix(" GT/s").ok_or_else(expected)?;
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let plain = |digits: &str, most: usize| {
        (1..=most).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    if !plain(whole, 4) || !plain(tenths, 1) {
        return Err(expected());
    }
    let digit = |digits: &str| digits.parse::<u32>().map_err(|_| expected());
    let speed = digit(whole)? * 1000 + digit(tenths)? * 100;
    if (1..=MOST_MTS).contains(&speed) { Ok(Some(speed)) } else { Err(expected()) }
}

/// `current_link_width` of a PCIe function, in lanes. None: it has no link (0), or the kernel does not know (255).
pub fn link_width(text: &str) -> Result<Option<u32>, String> {
    match number(text)? {
        0 | 255 => Ok(None),
        width @ 1..=64 => Ok(Some(width as u32)),
        _ => Err("not a number of lanes".to_owned()),
    }
}

/// Is a CPU online, by its own file? Copies of old kernels' files can be empty, which does not mean offline.
pub fn online(text: &str) -> Result<bool, String> {
    match text.trim() {
        "0" => Ok(false),
        "1" | "" => Ok(true),
        _ => Err("neither 0 nor 1".to_owned()),
    }
}

/// A plain number.
pub fn number(text: &str) -> Result<u64, String> {
    text.trim().parse().map_err(|_| "not a number".to_owned())
}

/// `cpu.weight` of a control group, 1 to 10000. The kernel shows 0 for one that may only run when nothing else does
/// (`cpu.idle`): that has the least.
pub fn cpu_weight(text: &str) -> Result<u32, String> {
    match number(text)? {
        weight @ 0..=10_000 => Ok((weight as u32).max(1)),
        _ => Err("must be 1 to 10000".to_owned()),
    }
}

/// `cpu.max` of a control group: quota and period, microseconds. Thousandths of a CPU, at least one; none without a quota.
pub fn cpu_max(text: &str) -> Result<Option<u64>, String> {
    const MOST_QUOTA_US: u64 = 1 << 44;
    const PERIODS_US: std::ops::RangeInclusive<u64> = 1000..=1_000_000;
    let mut fields = text.split_ascii_whitespace();
    let (Some(quota), Some(period), None) = (fields.next(), fields.next(), fields.next()) else {
        return Err("must be a quota, or `max`, and a period".to_owned());
    };
    let period = number(period)?;
    if !PERIODS_US.contains(&period) {
        return Err("its period must be 1000 to 1000000 us".to_owned());
    }
    if quota == "max" {
        return Ok(None);
    }
    match number(quota)? {
        quota @ 1..=MOST_QUOTA_US => Ok(Some((quota * 1000 / period).max(1))),
        _ => Err(format!("its quota must be 1 to {MOST_QUOTA_US} us")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn speeds_and_widths_of_links() {
        assert_eq!(link_speed("2.5 GT/s PCIe\n"), Ok(Some(2500)));
        assert_eq!((link_speed("64.0 GT/s PCIe"), link_speed("8 GT/s")), (Ok(Some(64_000)), Ok(Some(8000))));
        assert_eq!((link_speed("Unknown\n"), link_speed("Unknown speed")), (Ok(None), Ok(None)));
        for wrong in ["", "8", "8.0", "8.00 GT/s", "-8 GT/s", ".5 GT/s", "8. GT/s", "0 GT/s", "9999.9 GT/s x"]
        {
            assert_eq!(link_speed(wrong), Err("not a speed such as `8.0 GT/s PCIe`".to_owned()), "{wrong}");
        }
        assert_eq!(
            (link_width("16\n"), link_width("0\n"), link_width("255\n")),
            (Ok(Some(16)), Ok(None), Ok(None))
        );
        assert_eq!(link_width("65"), Err("not a number of lanes".to_owned()));
    }

    #[test]
    fn meminfo_of_node_and_host() {
        let expected = Memory { total_kib: 24_684_084, free_kib: 123 };
        let node = "Node 3 MemTotal:       24684084 kB\nNode 3 MemFree: 123 kB\nNode 3 MemUsed: x\n";
        let host = "MemTotal:       24684084 kB\nMemFree: 123 kB\nHugePages_Total:  0\n";
        assert_eq!((meminfo(node), meminfo(host)), (Ok(expected), Ok(expected)));
        assert_eq!(meminfo(""), Ok(Memory::default()));
        assert!(meminfo("MemTotal: 12 MB").unwrap_err().contains("MemTotal: 12 MB"));
        assert!(meminfo("MemTotal: -1 kB").is_err());
    }

    #[test]
    fn numbers_of_all_kinds() {
        assert_eq!(distances("10 21\t255\n"), Ok(vec![10, 21, 255]));
        assert!(distances("10 256").unwrap_err().contains("`256`"));
        assert_eq!(
            (cache_size_kib("32768K\n"), cache_size_kib("2M"), cache_size_kib("512")),
            (Ok(32768), Ok(2048), Ok(512))
        );
        assert!(cache_size_kib("K").is_err() && cache_size_kib("18446744073709551615M").is_err());
        assert_eq!(hex("0x8086\n", 0xffff), Ok(0x8086));
        assert!(
            hex("0x10000", 0xffff).is_err() && hex("8086", 0xffff).is_err() && hex("0x+1", 0xffff).is_err()
        );
        assert_eq!((numa_node("-1\n"), numa_node("7\n")), (Ok(None), Ok(Some(7))));
        assert!(numa_node("-2").is_err() && numa_node("x").is_err());
        assert_eq!((online("0\n"), online("1\n"), online("")), (Ok(false), Ok(true), Ok(true)));
        assert!(online("2").is_err());
    }

    #[test]
    fn weights_and_limits_of_control_groups() {
        assert_eq!(
            (cpu_weight("100\n"), cpu_weight("0\n"), cpu_weight("10000")),
            (Ok(100), Ok(1), Ok(10_000))
        );
        assert!(cpu_weight("10001").is_err() && cpu_weight("-1").is_err() && cpu_weight("").is_err());
        assert_eq!((cpu_max("max 100000\n"), cpu_max("250000 100000\n")), (Ok(None), Ok(Some(2500))));
        assert_eq!(cpu_max("1 1000000"), Ok(Some(1)), "some time, however short");
        for wrong in ["", "max", "100000", "max 999", "max 1000001", "0 100000", "x 100000", "1 2000 3"] {
            assert!(cpu_max(wrong).is_err(), "{wrong}");
        }
        assert!(cpu_max("18446744073709551615 1000").is_err());
    }

    #[test]
    fn masks() {
        assert_eq!(cpu_map("00000001,80000003\n").unwrap().to_string(), "0-1,31-32");
        assert_eq!(cpu_map("ff").unwrap().to_string(), "0-7");
        assert_eq!(cpu_map("0").unwrap(), CpuSet::new());
        assert!(cpu_map("").is_err() && cpu_map("1,,1").is_err() && cpu_map("123456789").is_err());
        assert!(cpu_map(&format!("1{}", ",0".repeat(256))).unwrap_err().contains("8192"));
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(.|[0-9a-fx, \\n:KMk-]){0,80}") {
            let _ = (meminfo(&text), distances(&text), cache_size_kib(&text), cpu_map(&text));
            let _ = (hex(&text, 0xffff), numa_node(&text), number(&text), online(&text));
            let _ = (cpu_weight(&text), cpu_max(&text));
        }

        #[test]
        fn masks_are_read_as_written(members in proptest::collection::btree_set(0..=CpuSet::MAX_CPU, 1..50)) {
            let mut words = vec![0u32; 256];
            for &cpu in &members {
                words[255 - cpu as usize / 32] |= 1 << (cpu % 32);
            }
            let text: Vec<String> = words.iter().map(|word| format!("{word:08x}")).collect();
            prop_assert_eq!(cpu_map(&text.join(",")), Ok(members.into_iter().collect()));
        }
    }
}
