use vnuma_lab_counters::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let p = vnuma_lab_pricing::by_name(&a[1]).unwrap();
    let d = match a[2].as_str() {
        "2n4c" => vec![vec![10, 21], vec![21, 10]],
        _ => vec![vec![10, 21, 31, 21], vec![21, 10, 21, 31], vec![31, 21, 10, 21], vec![21, 31, 21, 10]],
    };
    let m = Machine {
        profile: &a[2],
        nodes: d.len(),
        cpus_per_node: 2,
        memory_mib_per_node: 2048,
        distances: &d,
    };
    let r = region(&p, &m, if a.len() > 4 { Sampling::Full } else { Sampling::Sampled }).unwrap();
    std::fs::write(&a[3], &r).unwrap();
    println!("{} {}", build(std::path::Path::new("/tmp/lc/cache")).unwrap().display(), r.len());
}
