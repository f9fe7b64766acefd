//! The share of local pages over time: windows of equal length, and when vCPUs moved.

use serde::Serialize;

/// Windows that a run is cut into, as long as they are not shorter than [`SHORTEST_WINDOW`].
const WINDOWS: f64 = 60.0;
/// In seconds. A window has some hundred pages of each VM in the lab.
const SHORTEST_WINDOW: f64 = 0.5;

/// A freshly allocated page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Touch {
    /// When it was touched, in seconds since the start.
    pub seconds: f64,
    /// Whether it was on the node of the vCPU that touched it.
    pub local: bool,
}

/// A vCPU that came to another host node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Move {
    /// When, in seconds since the start.
    pub seconds: f64,
    /// The vCPU.
    pub vcpu: usize,
    /// Where it was; none for a CPU of no node.
    pub from_node: Option<u32>,
    /// Where it came to.
    pub to_node: Option<u32>,
}

/// One VM over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VmSeries {
    /// Share of local pages in each window; none where no page was touched.
    pub local_share: Vec<Option<f64>>,
    /// In order of time.
    pub moves: Vec<Move>,
}

/// Both VMs over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Series {
    /// Length of the run in seconds.
    pub seconds: f64,
    /// Length of a window in seconds; the first begins at 0.
    pub window_seconds: f64,
    /// The VM that vnumad publishes its topology to.
    pub dynamic: VmSeries,
    /// The otherwise identical VM that keeps the topology of its boot.
    #[serde(rename = "static")]
    pub static_: VmSeries,
}

impl Series {
    /// Of the pages and moves of both VMs. What lies outside of the run is left out.
    pub fn new(seconds: f64, dynamic: (&[Touch], Vec<Move>), static_: (&[Touch], Vec<Move>)) -> Self {
        let window_seconds = (seconds / WINDOWS).max(SHORTEST_WINDOW);
        let vm = |(touches, moves): (&[Touch], Vec<Move>)| VmSeries {
            local_share: shares(seconds, window_seconds, touches),
            moves: moves.into_iter().filter(|moved| (0.0..seconds).contains(&moved.seconds)).collect(),
        };
        Self { seconds, window_seconds, dynamic: vm(dynamic), static_: vm(static_) }
    }

    /// Runs of windows that have pages, as points: middle of the window in seconds, share in percent.
    pub fn lines(&self, vm: &VmSeries) -> Vec<Vec<(f64, f64)>> {
        let middle = |index: usize| {
            let start = index as f64 * self.window_seconds;
            (start + (start + self.window_seconds).min(self.seconds)) / 2.0
        };
        let windows: Vec<_> = vm.local_share.iter().enumerate().collect();
        let runs = windows.chunk_by(|one, next| one.1.is_some() == next.1.is_some());
        let points = |run: &[(usize, &Option<f64>)]| -> Vec<_> {
            run.iter().filter_map(|(index, share)| Some((middle(*index), (**share)? * 100.0))).collect()
        };
        runs.map(points).filter(|points| !points.is_empty()).collect()
    }
}

fn shares(seconds: f64, window_seconds: f64, touches: &[Touch]) -> Vec<Option<f64>> {
    // Pages local and all of each window.
    let mut windows = vec![(0u32, 0u32); (seconds / window_seconds).ceil() as usize];
    for touch in touches.iter().filter(|touch| touch.seconds >= 0.0) {
        if let Some((local, all)) = windows.get_mut((touch.seconds / window_seconds) as usize) {
            *local += u32::from(touch.local);
            *all += 1;
        }
    }
    windows.into_iter().map(|(local, all)| (all > 0).then(|| f64::from(local) / f64::from(all))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touches(pages: &[(f64, bool)]) -> Vec<Touch> {
        pages.iter().map(|&(seconds, local)| Touch { seconds, local }).collect()
    }

    #[test]
    fn a_window_without_pages_is_a_gap_and_not_zero() {
        let pages =
            touches(&[(0.1, true), (0.2, false), (0.3, true), (0.4, true), (1.0, false), (1.49, false)]);
        let series = Series::new(1.8, (&pages, vec![]), (&[], vec![]));
        assert_eq!(series.window_seconds, 0.5);
        assert_eq!(series.dynamic.local_share, [Some(0.75), None, Some(0.0), None]);
        assert_eq!(series.static_.local_share, [None; 4]);
        assert_eq!(series.lines(&series.dynamic), [vec![(0.25, 75.0)], vec![(1.25, 0.0)]]);
        assert_eq!(series.lines(&series.static_), Vec::<Vec<_>>::new());
    }

    #[test]
    fn neighbouring_windows_are_one_line_and_the_last_one_may_be_short() {
        let pages = touches(&[(0.0, true), (0.5, true), (1.0, true), (1.1, false)]);
        let series = Series::new(1.2, (&pages, vec![]), (&[], vec![]));
        assert_eq!(series.lines(&series.dynamic), [vec![(0.25, 100.0), (0.75, 100.0), (1.1, 50.0)]]);
    }

    #[test]
    fn what_lies_outside_of_the_run_is_left_out() {
        let moved = |seconds| Move { seconds, vcpu: 0, from_node: Some(0), to_node: Some(1) };
        let pages = touches(&[(-0.1, false), (0.1, true), (60.0, false), (1e9, false)]);
        let series = Series::new(60.0, (&pages, vec![moved(-1.0), moved(2.0), moved(60.0)]), (&[], vec![]));
        assert_eq!(series.window_seconds, 1.0);
        assert_eq!(series.dynamic.local_share.len(), 60);
        assert_eq!(series.dynamic.local_share.iter().flatten().collect::<Vec<_>>(), [&1.0]);
        assert_eq!(series.dynamic.moves, [moved(2.0)]);
    }

    #[test]
    fn a_long_run_has_long_windows() {
        let series = Series::new(900.0, (&[], vec![]), (&[], vec![]));
        assert_eq!((series.window_seconds, series.dynamic.local_share.len()), (15.0, 60));
    }
}
