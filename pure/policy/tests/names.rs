//! Words that clients of the API know.

use vnuma_policy::{
    migration::{Phase, Told},
    policies::StaysWhy,
    rehome_policy::{Patience, RehomeWhy},
    residency::Keeps,
    rules::Obstacle,
    scheduling::analyzer::VcpuType,
    sizing::ResizePhase,
};

#[test]
fn words_of_the_api_stay() {
    let obstacles =
        [Obstacle::Devices, Obstacle::Pool, Obstacle::Bound, Obstacle::Cpuset, Obstacle::NoMemory];
    assert_eq!(obstacles.map(<&str>::from), ["vfio", "pool", "bound", "cpuset", "no-memory"]);
    assert_eq!([Keeps::Merged, Keeps::Shared, Keeps::Pool].map(Keeps::name), ["ksm", "shared", "pool"]);
    let types = [VcpuType::Friendly, VcpuType::Fitting, VcpuType::Thrashing];
    assert_eq!(types.map(VcpuType::name), ["LLC-FR", "LLC-FI", "LLC-T"]);
    use ResizePhase as R;
    let resize = [R::Wanted, R::Asked, R::Waiting, R::Done, R::Partly, R::Stopping, R::Stopped, R::Failed];
    let words = ["asked", "asked", "waiting", "done", "partly", "stopped", "stopped", "failed"];
    assert_eq!(resize.map(R::name), words);
    let phases = [Phase::Marking, Phase::Detaching, Phase::Starting(true), Phase::Sending(Told::Nothing)];
    assert_eq!(phases.map(Phase::name), ["detaching", "detaching", "starting", "sending"]);
    let phases = [Phase::PostCopy, Phase::Returning, Phase::Done, Phase::Cancelled, Phase::Failed];
    assert_eq!(phases.map(Phase::name), ["post-copy", "returning", "done", "cancelled", "failed"]);
    let stays = [
        (StaysWhy::Devices, "vfio"),
        (StaysWhy::Pool { node: 0, page_kib: 4 }, "pool"),
        (StaysWhy::NotSeen, "not-seen"),
        (StaysWhy::NoMemory(0), "no-memory"),
        (StaysWhy::NoRoom { node: 0, needed_mib: 1, free_mib: 0 }, "no-room"),
        (StaysWhy::Scheduled, "vprobe"),
        (StaysWhy::Kept(Keeps::Merged), "ksm"),
        (StaysWhy::Waits(Patience::Rests { for_ns: 1 }), "rests"),
        (StaysWhy::Waits(Patience::Settles { stayed_ns: 1, settle_ns: 2 }), "settles"),
        (
            StaysWhy::Waits(Patience::Costs(RehomeWhy {
                stayed_ns: 1,
                lost_ns: 1,
                price_ns: 1,
                assumed: false,
            })),
            "cheap",
        ),
        (StaysWhy::Waits(Patience::Due), "due"),
        (StaysWhy::Spread, "spread"),
        (StaysWhy::Manual { guest_node: 0, node: 1 }, "manual"),
        (StaysWhy::Rehome, "rehome"),
        (StaysWhy::Resize, "resize"),
        (StaysWhy::Migration, "migration"),
        (StaysWhy::Unknown(String::new()), "unknown"),
        (StaysWhy::Bound { policy: "bind".into(), nodes: vec![0] }, "bound"),
        (StaysWhy::Cpuset(0), "cpuset"),
    ];
    stays.into_iter().for_each(|(why, word)| assert_eq!(why.name(), word));
}
