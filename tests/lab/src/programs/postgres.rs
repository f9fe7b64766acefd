//! A server of PostgreSQL with one client. Its backend runs on the vCPU that is moved.

use super::{ROUNDS, Reads, Row, Share, THERE, Trace, go_to};
use anyhow::{Context, Result, ensure};
use std::io::Write;
use std::process::{ChildStdin, ChildStdout};
use vnuma_scenario::{HANG_LIMIT, Lines, Process, Vm, wait_for};

/// What of it was brought.
const INSTALLED: &str = "/opt/programs/pginstall";
/// It refuses to be root.
const USER: &str = "nobody";
const DATA: &str = "/tmp/postgres";
/// A row fills a buffer of 8 KiB.
const ROWS: u64 = 512;
const PAGES_OF_ROW: u64 = 2;

/// Runs it, unless it was not brought.
pub fn watch(vm: &Vm) -> Result<Option<(Row, Option<String>)>> {
    if vm.exec(&["test", "-e", &format!("{INSTALLED}/bin/postgres")]).is_err() {
        return Ok(None);
    }
    println!("PostgreSQL");
    go_to(vm, 0)?;
    let make = format!(
        "chmod -R a+rX {THERE}; chmod -R a+x {INSTALLED}/bin; mkdir -p {DATA} && chown {USER} {DATA} &&
         setpriv --reuid={USER} --regid=65534 --clear-groups env LD_LIBRARY_PATH={INSTALLED}/lib \
         {INSTALLED}/bin/initdb -D {DATA} -U postgres -A trust --no-locale --no-sync"
    );
    vm.exec(&["sh", "-c", &make])?;
    let trace = Trace::new(vm, "postgres")?;
    let server = Server::start(vm, &trace)?;
    let mut client = Client::connect(vm)?;
    let version = client.ask("show server_version")?;
    let backend = client.ask("select pg_backend_pid()")?;
    vm.exec(&["taskset", "-c", "-p", "1", &backend])?;
    let create = "create table t (a int, b text); alter table t alter b set storage plain; select 1";
    client.ask(create)?;
    let at_start = trace.reads(vm, 0)?;

    // The first time it also comes to what others have touched.
    client.insert(vm, &backend)?;
    let before = client.insert(vm, &backend)?;
    ensure!(before[0] > ROWS && before[1] * 10 < before[0], "new buffers before the move: {before:?}");
    let asked = trace.lines(vm)?;
    go_to(vm, 1)?;
    let new = client.insert(vm, &backend)?;
    let mut again = [0, 0];
    for _ in 0..ROUNDS {
        client.ask(&format!("drop table t; {create}"))?;
        again = client.insert(vm, &backend)?;
    }
    println!(
        "  pages that a round of {ROWS} buffers brings, by node: {before:?}, {new:?}; used again: {again:?}"
    );
    let later = trace.reads(vm, asked)?;
    drop(client);
    server.end(vm)?;
    go_to(vm, 0)?;
    Ok(Some(judge(version, at_start, later, new, again)))
}

fn judge(
    version: String,
    at_start: Reads,
    later: Reads,
    new: [u64; 2],
    again: [u64; 2],
) -> (Row, Option<String>) {
    let share = |pages: [u64; 2], of: u64| Some(pages[1] * 100 / of.max(1));
    let (new, again): (Share, Share) =
        (share(new, new[0] + new[1]), share(again, (ROWS * PAGES_OF_ROW).max(again[0] + again[1])));
    let row = Row {
        name: "PostgreSQL, shared buffers".to_owned(),
        version,
        at_start,
        later,
        new,
        again,
        places: None,
    };
    // Other processes of the server touch some as well.
    let right = row.new.is_some_and(|new| new >= 90) && row.again.is_some_and(|again| again <= 10);
    let wrong = if !row.at_start.is_empty() || !row.later.is_empty() {
        // One that is built with libnuma is another row.
        Some(format!("PostgreSQL reads the topology: {:?}, later {:?}", row.at_start, row.later))
    } else {
        (!right).then(|| format!("PostgreSQL: on the new node: {:?}", (row.new, row.again)))
    };
    (row, wrong)
}

struct Server(Process);

impl Server {
    fn start(vm: &Vm, trace: &Trace) -> Result<Self> {
        let postgres = format!("{INSTALLED}/bin/postgres");
        let options = "-k /tmp -c listen_addresses= -c shared_buffers=32MB -c huge_pages=off -c fsync=off -c autovacuum=off";
        let strace = trace.strace();
        let command: Vec<&str> = strace
            .iter()
            .map(String::as_str)
            .chain(["-u", USER, &postgres, "-D", DATA])
            .chain(options.split(' '))
            .collect();
        Ok(Self(vm.spawn(&command)?))
    }

    fn end(mut self, vm: &Vm) -> Result<()> {
        let stop = format!("kill -INT $(head -n 1 {DATA}/postmaster.pid)");
        vm.exec(&["sh", "-c", &stop])?;
        self.0.succeed("the server")
    }
}

/// psql, and what it prints.
struct Client {
    _process: Process,
    input: ChildStdin,
    lines: Lines<ChildStdout>,
}

impl Client {
    fn connect(vm: &Vm) -> Result<Self> {
        let socket = format!("test -S /tmp/.s.PGSQL.5432 && grep -q ready {DATA}/postmaster.pid");
        wait_for("the server to be ready", HANG_LIMIT, || Ok(vm.exec(&["sh", "-c", &socket]).is_ok()))?;
        let (libraries, psql) = (format!("LD_LIBRARY_PATH={INSTALLED}/lib"), format!("{INSTALLED}/bin/psql"));
        let mut process =
            vm.spawn(&["env", &libraries, &psql, "-h", "/tmp", "-U", "postgres", "-AtqX", "postgres"])?;
        let input = process.0.stdin.take().context("no input")?;
        let lines = Lines::of_process(&mut process, "psql")?;
        Ok(Self { _process: process, input, lines })
    }

    /// Statements of which the last one answers with a line.
    fn ask(&mut self, statements: &str) -> Result<String> {
        writeln!(self.input, "{statements};").and_then(|()| self.input.flush()).context("psql")?;
        self.lines.next(statements)
    }

    /// Fills buffers. How many pages of shared memory the backend uses more than before, by node.
    fn insert(&mut self, vm: &Vm, backend: &str) -> Result<[u64; 2]> {
        let before = shared_pages(vm, backend)?;
        self.ask(&format!(
            "insert into t select g, repeat('x', 7000) from generate_series(1, {ROWS}) g; select 1"
        ))?;
        let after = shared_pages(vm, backend)?;
        Ok([0, 1].map(|node: usize| after[node].saturating_sub(before[node])))
    }
}

/// Of the shared memory that a process has touched: pages by node.
fn shared_pages(vm: &Vm, pid: &str) -> Result<[u64; 2]> {
    let maps = vm.exec(&["cat", &format!("/proc/{pid}/numa_maps")])?;
    Ok(pages_of_shared(&maps))
}

fn pages_of_shared(maps: &str) -> [u64; 2] {
    let mut pages = [0, 0];
    for line in maps.lines().filter(|line| line.contains("/dev/zero")) {
        for (node, pages) in pages.iter_mut().enumerate() {
            let of_node = format!("N{node}=");
            let count = line.split(' ').find_map(|word| word.strip_prefix(&of_node)?.parse::<u64>().ok());
            *pages += count.unwrap_or(0);
        }
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_shared_memory_are_counted() {
        let maps = "7f00 default file=/dev/zero\\040(deleted) dirty=7 N0=5 N1=2 kernelpagesize_kB=4\n\
                    7f10 default anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n\
                    7f20 default file=/dev/zero\\040(deleted) dirty=1 N1=1 kernelpagesize_kB=4\n";
        assert_eq!(pages_of_shared(maps), [5, 3]);
    }

    #[test]
    fn buffers_that_stay_are_no_share_of_the_new_node() {
        let judged = |new, again| judge("18".to_owned(), Reads::new(), Reads::new(), new, again);
        assert_eq!(judged([0, 1024], [0, 0]).1, None);
        assert!(judged([1024, 0], [0, 0]).1.is_some());
        assert!(judged([0, 1024], [0, 1024]).1.is_some());
    }

    #[test]
    fn a_server_that_reads_the_topology_is_not_the_one_of_the_table() {
        let reads = || Reads::from(["node/online".to_owned()]);
        let judged = |at_start, later| judge("18".to_owned(), at_start, later, [0, 1024], [0, 0]).1;
        assert!(judged(reads(), Reads::new()).is_some_and(|wrong| wrong.contains("node/online")));
        assert!(judged(Reads::new(), reads()).is_some());
    }
}
