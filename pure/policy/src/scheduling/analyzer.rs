//! The PMU data analyzer of *vProbe: Scheduling Virtual Machines on NUMA Systems*, section III-B: equations 1 to 3.
//!
//! The bounds of equation 3 are the paper's by default. They can be found for a host ([`calibrate`]) as section IV-A does,
//! and [`Adaptive`] follows the loads that run (the paper's section VI leaves that to future work).

use super::sample::{Counts, Sums};

/// The factor of equation 2: pressure is in references per thousand instructions.
pub const ALPHA: f64 = 1000.0;

/// How a vCPU uses the last-level cache (equation 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
pub enum VcpuType {
    /// LLC-FR, friendly: it hardly uses it.
    #[strum(serialize = "LLC-FR")]
    Friendly,
    /// LLC-FI, fitting: its data fits, unless others take the room.
    #[strum(serialize = "LLC-FI")]
    Fitting,
    /// LLC-T, thrashing: it misses a lot, also when alone.
    #[strum(serialize = "LLC-T")]
    Thrashing,
}

impl VcpuType {
    /// The paper's name.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// LLC-T and LLC-FI: the types that the partitioning assigns.
    pub fn is_memory_intensive(self) -> bool {
        self != Self::Friendly
    }
}

/// Bounds between the types, in references per thousand instructions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// From here on a vCPU is LLC-FI.
    pub low: f64,
    /// From here on it is LLC-T.
    pub high: f64,
}

impl Default for Bounds {
    /// The paper's (section IV-A).
    fn default() -> Self {
        Self { low: 3.0, high: 20.0 }
    }
}

/// Equation 1: the node, by position, that most of the accesses of a period went to. Of equal ones it is the first.
/// `None` when there were no accesses.
pub(super) fn affinity(sums: Sums) -> Option<usize> {
    (sums.largest > 0).then_some(sums.node)
}

/// Equation 2: LLC access pressure. `None` when no instruction was retired.
pub fn llc_access_pressure(counts: &Counts) -> Option<f64> {
    let instructions = counts.instructions;
    (instructions > 0).then(|| counts.llc_references as f64 / instructions as f64 * ALPHA)
}

/// Equation 3: the type that goes with a pressure.
pub fn vcpu_type(pressure: f64, bounds: Bounds) -> VcpuType {
    if pressure < bounds.low {
        VcpuType::Friendly
    } else if pressure < bounds.high {
        VcpuType::Fitting
    } else {
        VcpuType::Thrashing
    }
}

/// A load whose type is to be found: one vCPU that runs alone on a node with local memory, and again beside others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// References per thousand instructions, alone.
    pub pressure: f64,
    /// Share of the references that miss, alone, 0 to 1.
    pub miss_rate_alone: f64,
    /// The same while others fill the cache.
    pub miss_rate_beside_others: f64,
}

/// A load misses a lot from this share of its references on (LLC-T).
const MISSES_A_LOT: f64 = 0.5;
/// Misses per thousand instructions that a neighbour has to add to matter (LLC-FI). An LLC miss costs some 200 cycles more
/// than a hit, so that one more in a thousand instructions takes about a tenth of the time.
const MATTERS: f64 = 1.0;

/// The type of a load by its miss rates, without any bound on its pressure: the definitions of section III-B2.
pub fn type_by_miss_rate(load: &Measured) -> VcpuType {
    let alone = load.pressure * load.miss_rate_alone;
    let added = load.pressure * (load.miss_rate_beside_others - load.miss_rate_alone).max(0.0);
    if load.miss_rate_alone >= MISSES_A_LOT && alone >= MATTERS {
        VcpuType::Thrashing
    } else if added >= MATTERS {
        VcpuType::Fitting
    } else {
        VcpuType::Friendly
    }
}

/// Why no bounds separate the loads.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum CalibrationError {
    /// A type has no load.
    #[error("no load turned out to be {}", .0.name())]
    Missing(VcpuType),
    /// Two types overlap.
    #[error("a {} load has a pressure of {below:.2}, and a {} load one of {above:.2}: no bound separates them",
        .lower.name(), .upper.name())]
    Overlap {
        /// The type that should have the lower pressures.
        lower: VcpuType,
        /// Its highest one.
        below: f64,
        /// The type that should have the higher pressures.
        upper: VcpuType,
        /// Its lowest one.
        above: f64,
    },
}

/// Bounds that separate measured loads by their types: between the highest pressure of one type and the lowest of the
/// next, in the middle by ratio.
pub fn calibrate(loads: &[Measured]) -> Result<Bounds, CalibrationError> {
    let range = |wanted: VcpuType| {
        let of_type = loads.iter().filter(|load| type_by_miss_rate(load) == wanted);
        let pressures: Vec<f64> = of_type.map(|load| load.pressure).collect();
        let lowest = pressures.iter().copied().reduce(f64::min);
        lowest.zip(pressures.iter().copied().reduce(f64::max)).ok_or(CalibrationError::Missing(wanted))
    };
    let (friendly, fitting) = (range(VcpuType::Friendly)?, range(VcpuType::Fitting)?);
    let thrashing = range(VcpuType::Thrashing)?;
    let between = |lower, below: f64, upper, above: f64| {
        if below >= above {
            return Err(CalibrationError::Overlap { lower, below, upper, above });
        }
        // A load without any references has a pressure of 0.
        Ok((below.max(above / 100.0) * above).sqrt())
    };
    Ok(Bounds {
        low: between(VcpuType::Friendly, friendly.1, VcpuType::Fitting, fitting.0)?,
        high: between(VcpuType::Fitting, fitting.1, VcpuType::Thrashing, thrashing.0)?,
    })
}

/// Bounds that follow the vCPUs that run: each one's misses say what it is, and the bounds move between the types.
///
/// A bound stays between a third of its first value and three times that, and moves by at most a tenth a period, so that no
/// load can make every vCPU one type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adaptive {
    first: Bounds,
    now: Bounds,
}

/// Bounds of [`Adaptive`].
const FARTHEST: f64 = 3.0;
const STEP: f64 = 1.1;

impl Adaptive {
    /// Starts with these.
    pub fn new(first: Bounds) -> Self {
        Self { first, now: first }
    }

    /// The bounds of the present period.
    pub fn bounds(&self) -> Bounds {
        self.now
    }

    /// A period has ended: the pressure and the miss rate of each vCPU that ran.
    pub fn learn(&mut self, vcpus: impl Iterator<Item = (f64, f64)>) {
        // Below it, misses do not matter; above it and with a high rate, the cache is of no use to the load.
        let (mut friendly, mut fitting) = (None::<f64>, None::<(f64, f64)>);
        let mut thrashing = None::<f64>;
        for (pressure, miss_rate) in vcpus.filter(|(pressure, rate)| pressure.is_finite() && rate.is_finite())
        {
            if pressure < MATTERS || (pressure * miss_rate < MATTERS && pressure < self.now.low) {
                friendly = Some(friendly.map_or(pressure, |most| most.max(pressure)));
            } else if miss_rate >= MISSES_A_LOT {
                thrashing = Some(thrashing.map_or(pressure, |least| least.min(pressure)));
            } else {
                let (least, most) = fitting.unwrap_or((pressure, pressure));
                fitting = Some((least.min(pressure), most.max(pressure)));
            }
        }
        let middle = |below: Option<f64>, above: Option<f64>| {
            below
                .zip(above)
                .filter(|(below, above)| below < above)
                .map(|(below, above)| (below.max(above / 100.0) * above).sqrt())
        };
        let above_friendly = fitting.map(|(least, _)| least).or(thrashing);
        let low = middle(friendly, above_friendly);
        let high = middle(fitting.map(|(_, most)| most), thrashing);
        let toward = |now: f64, first: f64, wanted: Option<f64>| {
            let wanted = wanted.unwrap_or(now).clamp(first / FARTHEST, first * FARTHEST);
            wanted.clamp(now / STEP, now * STEP)
        };
        self.now.low = toward(self.now.low, self.first.low, low);
        self.now.high = toward(self.now.high, self.first.high, high).max(self.now.low);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn affinity_is_the_node_of_most_accesses() {
        let of = |accesses: &[u64]| affinity(Sums::of(accesses));
        assert_eq!(of(&[3, 9, 4]), Some(1));
        assert_eq!(of(&[0, 5, 5]), Some(1), "the first of equal ones");
        assert_eq!((of(&[0, 0]), of(&[])), (None, None));
    }

    #[test]
    fn pressure_is_references_per_thousand_instructions() {
        let counts =
            |llc_references, instructions| Counts { instructions, llc_references, ..Counts::default() };
        assert_eq!(llc_access_pressure(&counts(22_410, 1_000_000)), Some(22.41));
        assert_eq!(llc_access_pressure(&counts(0, 1)), Some(0.0));
        assert_eq!(llc_access_pressure(&counts(5, 0)), None);
    }

    /// Section IV-A: povray 0.48, ep 2.01, lu 15.38, mg 16.33, milc 21.68, libquantum 22.41.
    #[test]
    fn the_papers_programs_have_the_papers_types() {
        let kind = |pressure| vcpu_type(pressure, Bounds::default());
        assert_eq!([0.48, 2.01].map(kind), [VcpuType::Friendly; 2]);
        assert_eq!([15.38, 16.33].map(kind), [VcpuType::Fitting; 2]);
        assert_eq!([21.68, 22.41].map(kind), [VcpuType::Thrashing; 2]);
        assert_eq!(
            [3.0, 20.0].map(kind),
            [VcpuType::Fitting, VcpuType::Thrashing],
            "bounds are inclusive below"
        );
    }

    fn load(pressure: f64, miss_rate_alone: f64, miss_rate_beside_others: f64) -> Measured {
        Measured { pressure, miss_rate_alone, miss_rate_beside_others }
    }

    #[test]
    fn calibration_recovers_bounds_that_separate_the_types() {
        let friendly = [load(0.48, 0.3, 0.35), load(2.01, 0.02, 0.05)];
        let fitting = [load(15.38, 0.1, 0.5), load(16.33, 0.2, 0.6)];
        let thrashing = [load(21.68, 0.9, 0.95), load(22.41, 0.98, 0.98)];
        let bounds = calibrate(&[friendly, fitting, thrashing].concat()).expect("they can be told apart");
        assert!((2.01..15.38).contains(&bounds.low) && (16.33..21.68).contains(&bounds.high), "{bounds:?}");
        for (loads, kind) in
            [(friendly, VcpuType::Friendly), (fitting, VcpuType::Fitting), (thrashing, VcpuType::Thrashing)]
        {
            assert_eq!(loads.map(|load| vcpu_type(load.pressure, bounds)), [kind; 2]);
        }
    }

    #[test]
    fn loads_that_no_bound_separates_are_named() {
        let error = calibrate(&[load(1.0, 0.1, 0.1), load(15.0, 0.1, 0.5)]).expect_err("nothing thrashes");
        assert_eq!(error.to_string(), "no load turned out to be LLC-T");
        let error = calibrate(&[load(1.0, 0.1, 0.1), load(30.0, 0.1, 0.5), load(25.0, 0.9, 0.9)]);
        assert_eq!(
            error.expect_err("they overlap").to_string(),
            "a LLC-FI load has a pressure of 30.00, and a LLC-T load one of 25.00: no bound separates them"
        );
    }

    #[test]
    fn adaptive_bounds_go_between_the_types_step_by_step() {
        let mut adaptive = Adaptive::new(Bounds::default());
        let vcpus = [(0.5, 0.1), (8.0, 0.2), (12.0, 0.3), (30.0, 0.9), (40.0, 0.95)];
        adaptive.learn(vcpus.into_iter());
        let first = adaptive.bounds();
        assert!(first.low <= 3.0 && first.low >= 3.0 / STEP && first.high >= 20.0 / STEP, "{first:?}");
        for _ in 0..50 {
            adaptive.learn(vcpus.into_iter());
        }
        let bounds = adaptive.bounds();
        assert!((0.5..8.0).contains(&bounds.low) && (12.0..30.0).contains(&bounds.high), "{bounds:?}");
        let types = vcpus.map(|(pressure, _)| vcpu_type(pressure, bounds));
        assert_eq!(types.iter().filter(|kind| **kind == VcpuType::Thrashing).count(), 2);
    }

    #[test]
    fn no_load_takes_the_bounds_farther_than_threefold() {
        let mut adaptive = Adaptive::new(Bounds::default());
        for _ in 0..1000 {
            adaptive.learn([(0.1, 0.0), (1000.0, 0.1), (100_000.0, 1.0), (f64::NAN, 0.5)].into_iter());
        }
        let bounds = adaptive.bounds();
        assert!(bounds.low <= 9.0 && bounds.high <= 60.0 && bounds.low <= bounds.high, "{bounds:?}");
        adaptive.learn(std::iter::empty());
        assert_eq!(adaptive.bounds(), bounds, "an idle host teaches nothing");
    }
}
