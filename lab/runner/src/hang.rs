//! What a server that hangs can be asked before it is stopped.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use vnuma_lab_agent::protocol::Exec;

/// How long the server's kernel has for its part.
pub(crate) const KERNEL_LIMIT: Duration = Duration::from_secs(30);
/// How long QEMU has for an answer, and the most bytes of one.
const MONITOR_LIMIT: Duration = Duration::from_secs(5);
const MOST_BYTES: u64 = 1 << 20;
/// Between two looks at the CPUs: one that runs has moved meanwhile.
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);

/// Processes that wait for the kernel, where CPUs are, and what the kernel has said of either. Interrupts and the clock are read twice:
/// a CPU without a timer does not count on.
const LOOK: &str = "ps -eLo pid,tid,stat,psr,wchan:32,args --sort=pid | grep -v ']$' | cut -c1-160; \
    for look in 1 2; do cat /proc/uptime; grep -E 'CPU|LOC|RES|CAL|TLB' /proc/interrupts; sleep 1; done; \
    dmesg -C; echo w > /proc/sysrq-trigger; echo l > /proc/sysrq-trigger; echo q > /proc/sysrq-trigger; sleep 1; \
    dmesg | grep -vE '(R[0-9A-D][0-9A-Z]|RSP|RBP|Code|FS|CS|CR2): ' | cut -c1-160";

/// The command that asks the server's kernel.
pub(crate) fn look() -> Exec {
    Exec { argv: ["sh", "-c", LOOK].map(str::to_owned).into(), ..Exec::default() }
}

/// Where QEMU says that the CPUs are, twice.
pub(crate) fn cpus(monitor: &Path) -> String {
    let looks = || -> io::Result<String> {
        let stream = UnixStream::connect(monitor)?;
        stream.set_read_timeout(Some(MONITOR_LIMIT))?;
        stream.set_write_timeout(Some(MONITOR_LIMIT))?;
        let mut reader = BufReader::new(stream.try_clone()?.take(MOST_BYTES));
        let mut ask = |command: &str| -> io::Result<serde_json::Value> {
            (&stream).write_all(command.as_bytes())?;
            answer(&mut reader)
        };
        ask(r#"{"execute":"qmp_capabilities"}"#)?;
        let mut show = |what: &str, cpu: usize| -> io::Result<String> {
            let arguments = serde_json::json!({ "command-line": what, "cpu-index": cpu });
            let command = serde_json::json!({ "execute": "human-monitor-command", "arguments": arguments });
            Ok(ask(&command.to_string())?["return"].as_str().unwrap_or_default().to_owned())
        };
        let mut text = String::new();
        for _ in 0..2 {
            let registers = show("info registers -a", 0)?;
            text.push_str(&shown(&registers));
            for cpu in 0..registers.lines().filter(|line| line.starts_with("CPU#")).count() {
                text.push_str(&format!("  CPU#{cpu}: {}\n", pending(&show("info lapic", cpu)?)));
            }
            std::thread::sleep(BETWEEN_LOOKS);
        }
        Ok(text)
    };
    looks().unwrap_or_else(|error| format!("  {}: {error}\n", monitor.display()))
}

/// The next line that is neither the greeting nor an event.
fn answer(reader: &mut impl BufRead) -> io::Result<serde_json::Value> {
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let value: serde_json::Value = serde_json::from_str(&line)?;
        if value.get("return").is_some() || value.get("error").is_some() {
            return Ok(value);
        }
    }
}

/// A line per CPU of QEMU's pages of registers: where it is, whether it takes interrupts, whether it is halted.
fn shown(registers: &str) -> String {
    let lines = registers.lines().map(str::trim);
    let kept = lines.filter(|line| line.starts_with("CPU#") || line.starts_with("RIP="));
    kept.map(|line| format!("  {line}\n")).collect()
}

/// What a CPU's interrupt controller serves and what it has not delivered, of QEMU's page about it.
fn pending(lapic: &str) -> String {
    let lines = lapic.lines().map(str::trim);
    let kept: Vec<_> =
        lines.filter(|line| ["ISR", "IRR"].iter().any(|name| line.starts_with(name))).collect();
    kept.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greetings_and_events_are_no_answers() {
        let mut lines = BufReader::new(
            "{\"QMP\":{}}\n{\"event\":\"STOP\"}\n{\"return\":{}}\n{\"error\":{\"desc\":\"x\"}}\n".as_bytes(),
        );
        assert!(answer(&mut lines).unwrap().get("return").is_some());
        assert_eq!(answer(&mut lines).unwrap()["error"]["desc"], "x");
        assert_eq!(answer(&mut lines).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn only_the_place_of_a_cpu_is_shown() {
        let text = "\nCPU#0\r\nRAX=0 RBX=0\r\nRIP=ffffffff81 RFL=00000246 HLT=1\r\nES =0000\r\n";
        assert_eq!(shown(text), "  CPU#0\n  RIP=ffffffff81 RFL=00000246 HLT=1\n");
    }

    #[test]
    fn what_is_not_delivered_is_shown() {
        let text = "\r\nLVT0 \t 0x00010700\r\nISR\t (none)\r\nIRR\t 236 \r\n\r\nAPR 0x00 TPR 0x00\r\n";
        assert_eq!(pending(text), "ISR\t (none), IRR\t 236");
    }

    #[test]
    fn a_monitor_that_is_gone_is_said() {
        let text = cpus(Path::new("/nonexistent/qmp.sock"));
        assert!(text.starts_with("  /nonexistent/qmp.sock: No such file"), "{text}");
    }
}
