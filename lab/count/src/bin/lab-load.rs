//! Runs one load whose counts are known, and prints what was counted for it as JSON.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use lab_count::counters::{CounterSet, Measured, difference};
use lab_count::load::{Access, Chain, Matrix, Memory, access_device, compute, fill, stream, touch};
use lab_count::perf::{Mode, Target};
use lab_count::server;

#[derive(Parser)]
#[command(about = "Runs one load whose counts are known, and tells what was counted for it as JSON")]
struct Arguments {
    /// What to do
    #[arg(value_enum)]
    load: Load,
    /// Memory that it works on
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    mib: u32,
    /// Node that the memory is bound to
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..64))]
    node: Option<u32>,
    /// Use huge pages
    #[arg(long)]
    huge: bool,
    /// Accesses of a chain, rounds of computing, passes over memory
    #[arg(long, default_value_t = 1_000_000)]
    times: u64,
    /// File of a device's BAR, such as /sys/bus/pci/devices/ADDRESS/resource0
    #[arg(long, required_if_eq("load", "mmio"))]
    device: Option<std::path::PathBuf>,
    /// Write 0 to the device's register at OFFSET instead of reading the first one
    #[arg(long, value_name = "OFFSET", requires = "device")]
    write: Option<usize>,
    /// Count only what the load itself does, not the kernel's ticks meanwhile
    #[arg(long, conflicts_with = "uncounted")]
    user: bool,
    /// Do it without counting: for servers and guests without counters
    #[arg(long)]
    uncounted: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Load {
    /// Follow a chain through every line in random order, after one round to warm up
    Chase,
    /// Follow a chain through one line of every page, after one round to warm up
    Pages,
    /// Read memory in order, after one pass to warm up
    Stream,
    /// Multiply a matrix by a vector, block by block in random order, after one pass to warm up
    Matrix,
    /// Fill memory by a string instruction, after one pass to warm up
    Fill,
    /// Count down in a register
    Compute,
    /// Access a register of a device
    Mmio,
}

#[derive(serde::Serialize)]
struct Output {
    places: u64,
    elapsed_ns: u64,
    /// Nothing with --uncounted.
    #[serde(flatten)]
    measured: Option<Measured>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let map = || -> Result<Memory> {
        let bytes = (arguments.mib as usize) << 20;
        Memory::map(bytes, arguments.node.map(|node| node as usize), arguments.huge)
            .with_context(|| format!("{} MiB on node {:?}", arguments.mib, arguments.node))
    };
    let times = arguments.times;
    let chase = |mut chain: Chain| -> Result<Output> {
        chain.follow(chain.places() as u64);
        let places = chain.places() as u64;
        measure(&arguments, places, || chain.follow(times))
    };
    let passes = |pass: fn(&mut Memory)| -> Result<Output> {
        let mut memory = map()?;
        touch(&mut memory);
        pass(&mut memory);
        let places = (memory.bytes() / 64) as u64;
        measure(&arguments, places, || (0..times).for_each(|_| pass(&mut memory)))
    };
    let output = match arguments.load {
        Load::Chase => chase(Chain::random(map()?, 1))?,
        Load::Pages => chase(Chain::by_page(map()?))?,
        Load::Stream => passes(stream)?,
        Load::Matrix => {
            let mut memory = map()?;
            touch(&mut memory);
            let places = (memory.bytes() / 64) as u64;
            let mut matrix = Matrix::new(memory, 1);
            let mut pass = || (0..matrix.blocks()).for_each(|_| matrix.multiply());
            pass();
            measure(&arguments, places, || (0..times).for_each(|_| pass()))?
        }
        Load::Fill => passes(fill)?,
        Load::Compute => measure(&arguments, 0, || compute(times))?,
        Load::Mmio => {
            let device = arguments.device.as_deref().context("--device is missing")?;
            let mut result = Ok(());
            let access = arguments.write.map_or(Access::Read, Access::Write);
            let output = measure(&arguments, 0, || result = access_device(device, access, times))?;
            result.with_context(|| device.display().to_string())?;
            output
        }
    };
    println!("{}", serde_json::to_string(&output)?);
    Ok(())
}

fn measure(arguments: &Arguments, places: u64, work: impl FnOnce()) -> Result<Output> {
    let start = Instant::now();
    if arguments.uncounted {
        work();
        let elapsed_ns = start.elapsed().as_nanos() as u64;
        return Ok(Output { places, elapsed_ns, measured: None });
    }
    let header = server::header()?;
    let mode = if arguments.user { Mode::User } else { Mode::All };
    let counters = CounterSet::open(&header, Target::Caller, mode)
        .context("perf_event_open (is the PMU module loaded?)")?;
    let before = counters.read()?;
    let start = Instant::now();
    work();
    let elapsed_ns = start.elapsed().as_nanos() as u64;
    let after = counters.read()?;
    ensure!(after.counts.instructions > before.counts.instructions, "instructions: nothing was counted");
    Ok(Output { places, elapsed_ns, measured: Some(difference(&before, &after)) })
}
