//! Units of systemd. Control groups of units are systemd's to write, so it is asked to.

use super::Undone;
use crate::{
    ends::Ends,
    journal::{Change, is_unit},
};
use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use vnuma_model::CpuSet;
use vnuma_process::text::sanitize_reason;

const CPUS: &str = "AllowedCPUs";
const MEMS: &str = "AllowedMemoryNodes";
/// systemd answers at once unless it is stuck.
const LIMIT: Duration = Duration::from_secs(20);
const ANSWER_LIMIT: u64 = 64 * 1024;
/// Where it keeps properties that were set until the next boot; the second is for units that have been made at run time.
const DROP_INS: [&str; 2] = ["run/systemd/system.control", "run/systemd/transient"];

/// What is asked of systemd.
pub trait Systemd {
    /// `AllowedCPUs` and `AllowedMemoryNodes` of a unit, as lists of numbers; empty if they are not set.
    fn allowed(&self, unit: &str) -> Result<(String, String), String>;
    /// Sets properties of a unit until the next boot.
    fn set(&self, unit: &str, properties: &[(&str, &str)]) -> Result<(), String>;
    /// Properties of a unit that have been set until the next boot.
    fn drop_ins(&self, unit: &str) -> Vec<String>;
    /// Removes the files of properties that have been set until the next boot, but for these.
    fn tidy(&self, unit: &str, but: &[String]) -> Result<(), String>;
}

/// The unit of the system whose control group this is. Groups below a unit belong to whom the unit delegates them to, such as
/// a user's systemd or a container manager.
pub fn unit_of(path: &str) -> Option<String> {
    let (slices, unit) = path.strip_prefix('/')?.rsplit_once('/').unwrap_or(("", path.strip_prefix('/')?));
    let only_slices = slices.split('/').filter(|part| !part.is_empty()).all(|part| part.ends_with(".slice"));
    (only_slices && is_unit(unit)).then(|| unit.to_owned())
}

/// The systemd that runs, if one does.
pub fn running(root: &Path, ends: &Ends) -> Option<Box<dyn Systemd>> {
    let here = root.join("run/systemd/system").is_dir();
    here.then(|| Box::new(Systemctl { root: root.to_owned(), ends: ends.clone() }) as Box<dyn Systemd>)
}

/// `systemctl`.
struct Systemctl {
    root: PathBuf,
    ends: Ends,
}

impl Systemctl {
    fn call(&self, arguments: &[&str]) -> Result<String, String> {
        let failed = |what: String| format!("systemctl {}: {what}", arguments.join(" "));
        let mut child = Command::new("systemctl")
            .args(["--no-ask-password", "--no-pager"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let end = Instant::now() + LIMIT;
        let status = loop {
            match child.try_wait().map_err(|error| failed(error.to_string()))? {
                Some(status) => break status,
                None if Instant::now() > end || self.ends.have_come() => {
                    // It may have ended just now.
                    let _ = child.kill();
                    let _ = child.wait();
                    let late = format!("no answer within {} s", LIMIT.as_secs());
                    return Err(failed(if Instant::now() > end {
                        late
                    } else {
                        "a signal to end".to_owned()
                    }));
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let read = |pipe: Option<&mut dyn Read>| {
            let mut text = String::new();
            // A short answer: it is in the pipe.
            let _ = pipe.map(|pipe| pipe.take(ANSWER_LIMIT).read_to_string(&mut text));
            text
        };
        let answer = read(child.stdout.as_mut().map(|pipe| pipe as &mut dyn Read));
        if status.success() {
            return Ok(answer);
        }
        let error = read(child.stderr.as_mut().map(|pipe| pipe as &mut dyn Read));
        Err(failed(format!("{status}: {}", sanitize_reason(error.trim()))))
    }
}

impl Systemd for Systemctl {
    fn allowed(&self, unit: &str) -> Result<(String, String), String> {
        let answer = self.call(&["show", unit, &format!("--property={CPUS},{MEMS}")])?;
        Ok((property(&answer, CPUS), property(&answer, MEMS)))
    }

    fn set(&self, unit: &str, properties: &[(&str, &str)]) -> Result<(), String> {
        let words: Vec<String> = properties.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let mut arguments = vec!["set-property", "--runtime", unit];
        arguments.extend(words.iter().map(String::as_str));
        self.call(&arguments).map(drop)
    }

    fn drop_ins(&self, unit: &str) -> Vec<String> {
        let files = drop_in_files(&self.root, unit).into_iter().filter(|(_, file)| file.exists());
        files.map(|(property, _)| property.to_owned()).collect()
    }

    fn tidy(&self, unit: &str, but: &[String]) -> Result<(), String> {
        if remove_drop_ins(&self.root, unit, but) {
            self.call(&["daemon-reload"])?;
        }
        Ok(())
    }
}

/// A property of `systemctl show`, as a list of numbers with commas.
fn property(answer: &str, name: &str) -> String {
    let value = answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    value.unwrap_or_default().split_ascii_whitespace().collect::<Vec<_>>().join(",")
}

/// Files that hold properties that were set until the next boot.
fn drop_in_files(root: &Path, unit: &str) -> Vec<(&'static str, PathBuf)> {
    let file = |directory: &str, property: &'static str| {
        (property, root.join(directory).join(format!("{unit}.d/50-{property}.conf")))
    };
    DROP_INS.iter().flat_map(|directory| [CPUS, MEMS].map(|property| file(directory, property))).collect()
}

/// Removes those but for these properties. True if there was one.
fn remove_drop_ins(root: &Path, unit: &str, but: &[String]) -> bool {
    let mut removed = false;
    for (property, file) in drop_in_files(root, unit) {
        if !but.iter().any(|kept| kept == property) {
            removed |= fs::remove_file(&file).is_ok();
        }
        if let Some(directory) = file.parent() {
            // It stays if there is something else in it.
            let _ = fs::remove_dir(directory);
        }
    }
    removed
}

fn same(found: &str, set: &str) -> bool {
    let parse = |list: &str| list.parse::<CpuSet>().unwrap_or_default();
    parse(found) == parse(set)
}

/// Confines a unit as the change says, which is in the journal.
pub fn confine(systemd: &dyn Systemd, change: &Change) -> Result<(), String> {
    let Change::Unit { unit, cpus, mems, .. } = change else { return Ok(()) };
    let mut properties = vec![(CPUS, cpus.set.as_str())];
    properties.extend(mems.as_ref().map(|mems| (MEMS, mems.set.as_str())));
    systemd.set(unit, &properties)
}

/// Gives a unit back what it had.
pub fn release(systemd: &dyn Systemd, change: &Change) -> Result<Undone, String> {
    let Change::Unit { unit, cpus, mems, drop_ins, .. } = change else {
        return Err("not a change of a unit".to_owned());
    };
    let (found_cpus, found_mems) = systemd.allowed(unit)?;
    let all = [Some((CPUS, found_cpus, cpus)), mems.as_ref().map(|mems| (MEMS, found_mems, mems))];
    let (mut back, mut others) = (Vec::new(), false);
    for (name, found, value) in all.into_iter().flatten() {
        if same(&found, &value.set) {
            back.push((name, value.former.as_str()));
        } else if !same(&found, &value.former) {
            others = true;
        }
    }
    if !back.is_empty() {
        systemd.set(unit, &back)?;
    }
    systemd.tidy(unit, drop_ins)?;
    Ok(match others {
        true => Undone::Left(format!("unit {unit}: somebody else has set its {CPUS}")),
        false => Undone::Restored(format!("unit {unit} has its {CPUS} again")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Value;
    use std::{cell::RefCell, rc::Rc};

    #[test]
    fn only_units_of_the_system_are_units() {
        for (path, unit) in [
            ("/system.slice/memcached.service", Some("memcached.service")),
            ("/system.slice/system-dpdk.slice/dpdk@0.service", Some("dpdk@0.service")),
            ("/user.slice/user-0.slice/session-3.scope", Some("session-3.scope")),
            ("/init.scope", Some("init.scope")),
            ("/system.slice/systemd\\x2dx.service", Some("systemd\\x2dx.service")),
            ("/user.slice/user-0.slice/user@0.service/app.slice/x.service", None),
            ("/system.slice/docker-1.scope/inner", None),
            ("/system.slice/a.service/b.service", None),
            ("/system.slice", None),
            ("/x/a.service", None),
            ("/system.slice/--runtime.service", None),
            ("/system.slice/a b.service", None),
            ("/", None),
            ("", None),
        ] {
            assert_eq!(unit_of(path).as_deref(), unit, "{path}");
        }
    }

    /// Properties of one unit.
    #[derive(Clone, Default)]
    struct Fake(Rc<RefCell<(String, String, Vec<String>)>>);

    impl Systemd for Fake {
        fn allowed(&self, _: &str) -> Result<(String, String), String> {
            let state = self.0.borrow();
            Ok((state.0.clone(), state.1.clone()))
        }

        fn set(&self, unit: &str, properties: &[(&str, &str)]) -> Result<(), String> {
            let mut state = self.0.borrow_mut();
            for (name, value) in properties {
                match *name {
                    CPUS => state.0 = (*value).to_owned(),
                    _ => state.1 = (*value).to_owned(),
                }
                state.2.push(format!("{unit} {name}={value}"));
            }
            Ok(())
        }

        fn drop_ins(&self, _: &str) -> Vec<String> {
            Vec::new()
        }

        fn tidy(&self, _: &str, _: &[String]) -> Result<(), String> {
            Ok(())
        }
    }

    #[test]
    fn a_unit_is_confined_and_given_back_what_it_had() {
        let fake = Fake::default();
        let value = |former: &str, set: &str| Value { former: former.to_owned(), set: set.to_owned() };
        let (unit, path) = ("a.service".to_owned(), "/system.slice/a.service".to_owned());
        let (cpus, mems, drop_ins) = (value("0-7", "4-7"), Some(value("0-1", "1")), Vec::new());
        let change = Change::Unit { pid: 7, started: 1, unit, path, cpus, mems, drop_ins };
        fake.set("a.service", &[(CPUS, "0-7"), (MEMS, "0-1")]).expect("set");
        confine(&fake, &change).expect("confined");
        assert_eq!(fake.allowed("a.service"), Ok(("4-7".into(), "1".into())));
        let undone = release(&fake, &change);
        assert!(matches!(undone, Ok(Undone::Restored(_))), "{undone:?}");
        assert_eq!(fake.allowed("a.service"), Ok(("0-7".into(), "0-1".into())));
        fake.set("a.service", &[(CPUS, "0")]).expect("set");
        assert!(matches!(release(&fake, &change), Ok(Undone::Left(_))));
        assert_eq!(fake.allowed("a.service").expect("known").0, "0");
    }

    #[test]
    fn answers_and_files_of_systemd() {
        let answer = "AllowedCPUs=0-3 8\nAllowedMemoryNodes=\n";
        assert_eq!((property(answer, CPUS), property(answer, MEMS)), ("0-3,8".into(), String::new()));
        assert_eq!(property("", CPUS), "");
        let root = tempfile::tempdir().expect("a directory");
        let systemctl = Systemctl { root: root.path().to_owned(), ends: Ends::default() };
        let unit = root.path().join("run/systemd/system.control/a.service.d");
        fs::create_dir_all(&unit).expect("made");
        let file = |name: &str| unit.join(format!("50-{name}.conf"));
        fs::write(file(CPUS), "[Service]\nAllowedCPUs=0-7\n").expect("written");
        assert_eq!(systemctl.drop_ins("a.service"), [CPUS]);
        fs::write(file(MEMS), "[Service]\nAllowedMemoryNodes=0-1\n").expect("written");
        assert!(remove_drop_ins(root.path(), "a.service", &[CPUS.to_owned()]));
        assert!(file(CPUS).exists() && !file(MEMS).exists(), "what was there before stays");
        assert!(remove_drop_ins(root.path(), "a.service", &[]) && !unit.exists());
        assert!(!remove_drop_ins(root.path(), "a.service", &[]));
    }
}
