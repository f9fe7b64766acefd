//! Reservations: every event in every state, requests that come at once, and the file that they are kept in.

mod common;

use common::{GIB, MIB2, Node, address, claim, device, free, host, paper, vm};
use proptest::prelude::*;
use std::path::Path;
use vnuma_model::{CpuLayout, HostTopology};
use vnuma_placement::{
    Claim, PlaceError, Request, RequestError,
    reservation::{Book, Ground, LIFETIME_NS, MAX_RESERVATIONS, ReleaseError, ReserveError, State, file},
};

const SECOND: u64 = 1_000_000_000;

fn named(name: &str, request: Request) -> Request {
    Request { name: name.into(), ..request }
}

fn reserve(
    book: &mut Book,
    host: &HostTopology,
    request: &Request,
    now_ns: u64,
) -> Result<u64, ReserveError> {
    let ground = Ground { host, layout: &CpuLayout::default(), others: &[] };
    book.reserve(ground, |_, _| 0, request, now_ns, 10 * SECOND).map(|(id, _)| id)
}

/// A book with one reservation, `a`, in each state that there is.
fn states() -> [(&'static str, Book); 4] {
    let waiting = || {
        let mut book = Book::default();
        assert_eq!(reserve(&mut book, &paper(), &vm(2, GIB, &[1]), 0), Ok(0));
        book
    };
    let mut held = waiting();
    assert_eq!(held.appeared("a", 7, Some(5), SECOND), Some(0));
    let mut over = waiting();
    assert_eq!(over.expire(10 * SECOND).len(), 1);
    [("none", Book::default()), ("waiting", waiting()), ("held", held), ("over", over)]
}

/// What is left of `a`.
fn state(book: &Book) -> Option<State> {
    book.of("a").map(|reservation| reservation.state)
}

#[test]
fn every_event_in_every_state() {
    let waiting = Some(State::Waiting { until_ns: 10 * SECOND });
    let held = Some(State::Held { pid: 7, started: Some(5) });
    type Event = (&'static str, fn(&mut Book), [Option<State>; 4]);
    let new = Some(State::Waiting { until_ns: 12 * SECOND });
    let events: [Event; 8] = [
        (
            "reserve",
            |book| drop(reserve(book, &paper(), &vm(1, GIB, &[]), 2 * SECOND)),
            [new, waiting, held, new],
        ),
        (
            "appeared",
            |book| assert!(book.appeared("a", 7, Some(5), 9 * SECOND).is_none_or(|id| id == 0)),
            [None, held, held, None],
        ),
        (
            "appeared too late",
            |book| assert!(book.appeared("a", 7, Some(5), 10 * SECOND).is_none_or(|id| id == 0)),
            [None, waiting, held, None],
        ),
        (
            "another appeared",
            |book| assert!(book.appeared("b", 8, Some(5), SECOND).is_none_or(|id| id == 0)),
            [None, waiting, held, None],
        ),
        ("gone", |book| drop(book.gone("a", 7)), [None, waiting, None, None]),
        ("another is gone", |book| drop(book.gone("a", 8)), [None, waiting, held, None]),
        ("release", |book| drop(book.release("a")), [None, None, held, None]),
        ("expire", |book| drop(book.expire(10 * SECOND)), [None, None, held, None]),
    ];
    for (event, apply, after) in events {
        for ((before, mut book), after) in states().into_iter().zip(after) {
            apply(&mut book);
            assert_eq!(state(&book), after, "{event} while {before}");
        }
    }
}

#[test]
fn what_is_refused_says_why() {
    let [_, (_, mut waiting), (_, mut held), _] = states();
    let again = reserve(&mut waiting, &paper(), &vm(1, GIB, &[]), 0).expect_err("its name is taken");
    assert_eq!(again.to_string(), "name a: reservation 0 has it");
    let taken =
        reserve(&mut waiting, &paper(), &named("b", vm(1, GIB, &[1])), 0).expect_err("its device is taken");
    assert_eq!(taken.to_string(), "device 0000:01:00.0: in use by a");
    assert_eq!(held.release("a"), Err(ReleaseError::Held { id: 0, name: "a".into(), pid: 7 }));
    assert_eq!(held.release("b").expect_err("none").to_string(), "there is no reservation of the name \"b\"");
    let ground = Ground { host: &paper(), layout: &CpuLayout::default(), others: &[] };
    let short = held.reserve(ground, |_, _| 0, &named("b", vm(1, GIB, &[])), 0, SECOND - 1);
    assert_eq!(short.expect_err("too short").to_string(), "lifetime 999 ms: expected 1000 to 3600000");
    assert!((SECOND..=3600 * SECOND).contains(&LIFETIME_NS));
}

#[test]
fn fifty_at_once_share_nothing_and_the_first_ones_fit() {
    let nodes = [Node("0-15", 16 << 10, 0), Node("16-31", 16 << 10, 0)];
    let host = host(&nodes, &[device(1, Some(0))]);
    let mut book = Book::default();
    let results: Vec<_> = (0..50)
        .map(|number| reserve(&mut book, &host, &named(&format!("vm{number}"), vm(2, GIB, &[])), 0))
        .collect();
    let refused = |result: &Result<u64, ReserveError>| {
        matches!(result, Err(ReserveError::Place(PlaceError::Refused(_))))
    };
    assert!(results[..16].iter().all(Result::is_ok) && results[16..].iter().all(refused), "{results:?}");
    let mut cpus: Vec<u32> = book.all().flat_map(|one| one.placement.pins().map(|pin| pin.cpu)).collect();
    cpus.sort_unstable();
    assert_eq!(cpus, (0..32).collect::<Vec<_>>());
    // What a reservation had is free when it is over, also for one that comes in the same moment.
    assert_eq!(reserve(&mut book, &host, &named("late", vm(32, 32 * GIB, &[1])), 10 * SECOND), Ok(16));
    assert_eq!(book.all().count(), 1);
}

#[test]
fn what_others_have_is_reserved_for_nobody() {
    let (mut book, host) = (Book::default(), paper());
    let others = [Claim { devices: vec![address(3)], ..claim("0-7") }];
    let ground = Ground { host: &host, layout: &CpuLayout::default(), others: &others };
    let mut reserve = |request: &Request| book.reserve(ground, |_, _| 0, request, 0, 10 * SECOND);
    let (_, placed) = reserve(&vm(2, GIB, &[])).expect("there is room");
    assert_eq!(placed.placement.cpus().to_string(), "8-9");
    let error = reserve(&named("b", vm(1, GIB, &[3]))).expect_err("in use").to_string();
    assert_eq!(error, "device 0000:03:00.0: in use by other");
    // What is free is net of both.
    let free: Vec<u32> = book.capacity(ground, |_, _| 0).nodes.iter().map(|node| node.free_cpus).collect();
    assert_eq!(free, [0, 6]);
}

#[test]
fn a_vm_takes_the_memory_that_was_promised_to_it() {
    let [_, (_, waiting), (_, held), _] = states();
    let promised = |book: &Book| {
        let claims = book.claims(|name, node| if (name, node) == ("a", 0) { 300 << 20 } else { 0 });
        let of =
            |node: u32| claims[0].memory.iter().find(|promise| promise.node == node).map(|p| p.bytes >> 20);
        (of(0), of(1))
    };
    assert_eq!(promised(&waiting), (Some(512), Some(512)), "a VM that is not there has nothing");
    assert_eq!(promised(&held), (Some(212), Some(512)));
    let capacity = free(&paper(), &held.claims(|_, _| 0));
    assert_eq!(capacity.nodes.iter().map(|node| node.free_cpus).collect::<Vec<_>>(), [7, 7]);
    assert_eq!((waiting.next_deadline_ns(), held.next_deadline_ns()), (Some(10 * SECOND), None));
}

fn parse(text: &str) -> Result<Book, String> {
    file::parse(Path::new("/run/vnuma/reservations.json"), text, "boot", SECOND)
        .map_err(|error| error.to_string())
}

#[test]
fn the_file_holds_the_book_until_the_host_is_rebooted() {
    for (name, book) in states() {
        let text = file::print(&book, "boot");
        assert_eq!(parse(&text).as_ref(), Ok(&book), "{name}");
        let other = file::parse(Path::new("x"), &text, "another boot", 0).expect("understood");
        assert_eq!(other, Book::default(), "{name}");
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn a_file_that_makes_no_sense_is_refused_with_field_and_value() {
    let [_, (_, waiting), (_, held), _] = states();
    let (waiting, held) = (file::print(&waiting, "boot"), file::print(&held, "boot"));
    let second = waiting.replace("\"reservations\":[", &format!("\"reservations\":[{},", one(&waiting)));
    for (text, from, to, message) in [
        (&waiting, "\"version\":1", "\"version\":2", "version: 2: expected 1"),
        (
            &waiting,
            "\"next_id\":1",
            "\"next_id\":-1",
            "next_id: invalid value: integer `-1`, expected u64 at line 1",
        ),
        (
            &waiting,
            "\"next_id\":1",
            "\"next_id\":0",
            "reservations[0].id: 0: expected one below next_id 0 that",
        ),
        (
            &waiting,
            "\"next_id\":1",
            "\"more\\u001b\":1",
            "more\\u{1b}: unknown field `more\\u{1b}`, expected one of",
        ),
        (
            &waiting,
            "10000000000",
            "9999000000000",
            "reservations[0].state.waiting.until_ns: 9999000000000: expected at most an hour from now, 3601000000000",
        ),
        (
            &held,
            "\"pid\":7",
            "\"pid\":-7",
            "reservations[0].state.held.pid: -7: expected the number of a process",
        ),
        (&waiting, "\"a\"", "\"-a\"", "reservations[0].placement.name: \"-a\": expected the name of a VM"),
        (
            &waiting,
            ":4096",
            ":4097",
            "reservations[0].placement.page_bytes: 4097: expected a power of two from",
        ),
        (
            &waiting,
            "536870912",
            "536870913",
            "reservations[0].placement.guest_nodes[0].memory_bytes: 536870913: exp",
        ),
        (
            &waiting,
            "\"home\":1",
            "\"home\":0",
            "reservations[0].placement.guest_nodes[1].home: 0: expected a host no",
        ),
        (
            &waiting,
            "\"home\":1",
            "\"home\":1024",
            "reservations[0].placement.guest_nodes[1].home: 1024: expected a host no",
        ),
        (
            &waiting,
            "\"cpu\":8}",
            "\"cpu\":0}",
            "reservations[0].placement.guest_nodes[1].vcpus: 0: expected a CPU up",
        ),
        (
            &waiting,
            "\"vcpu\":1",
            "\"vcpu\":2",
            "reservations[0].placement.guest_nodes[1].vcpus: 2: expected vCPUs in",
        ),
        (
            &waiting,
            "[[10,21],[21,10]]",
            "[[10]]",
            "reservations[0].placement.distances: 1: expected a row for each",
        ),
        (
            &waiting,
            "\"guest_node\":0",
            "\"guest_node\":2",
            "reservations[0].placement.devices[0].guest_node: Some(2)",
        ),
        (
            &waiting,
            "0000:01:00.0",
            "../../x",
            "reservations[0].placement.devices[0].address: \"../../x\": expected",
        ),
        (&second, "", "", "reservations[1].id: 0: expected one below next_id 1 that no other has"),
        (&waiting, "]}\n", "]} x", "end of file: trailing characters at line 1 column"),
        (&waiting, "{", "", ".: "),
    ] {
        let broken = text.replacen(from, to, 1);
        assert!(from.is_empty() || broken != *text, "{from} is not in {text}");
        let error = parse(&broken).expect_err(message);
        let expected = format!("/run/vnuma/reservations.json: {message}");
        assert!(error.starts_with(&expected), "{error}\n{expected}");
        assert!(!error.contains(char::is_control), "{error:?}");
    }
}

/// The only reservation of a file.
fn one(text: &str) -> String {
    let begin = text.find("\"reservations\":[").expect("reservations") + "\"reservations\":[".len();
    text[begin..].trim_end().strip_suffix("]}").expect("the end").to_owned()
}

#[test]
fn two_reservations_share_neither_cpus_nor_devices_nor_names() {
    let [_, (_, waiting), ..] = states();
    let text = file::print(&waiting, "boot");
    let other = one(&text).replacen("\"id\":0", "\"id\":1", 1);
    let both = |other: &str| {
        let text = text.replace("\"next_id\":1", "\"next_id\":2");
        parse(&text.replace("\"reservations\":[", &format!("\"reservations\":[{other},")))
    };
    assert!(
        both(&other).expect_err("name").contains("reservations[1].placement.name: a: another reservation")
    );
    let other = other.replace("\"a\"", "\"b\"");
    assert!(
        both(&other)
            .expect_err("CPU")
            .contains("reservations[1].placement.guest_nodes: CPU 0: reserved twice")
    );
    let other = other.replace("\"cpu\":0", "\"cpu\":1").replace("\"cpu\":8", "\"cpu\":9");
    let error = both(&other).expect_err("device");
    assert!(error.contains("reservations[1].placement.devices: 0000:01:00.0: reserved twice"), "{error}");
    assert!(both(&other.replace(&address(1), &address(2))).is_ok());
}

#[derive(Clone, Debug)]
enum Event {
    Reserve(u32, u32, u64, bool),
    Appeared(u32),
    Gone(u32),
    Release(u32),
    Wait(u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let vm = 0..6_u32;
    let event = prop_oneof![
        3 => (vm.clone(), 1..6_u32, 1..6000_u64, any::<bool>()).prop_map(|(n, c, u, d)| Event::Reserve(n, c, u, d)),
        2 => vm.clone().prop_map(Event::Appeared),
        1 => vm.clone().prop_map(Event::Gone),
        1 => vm.prop_map(Event::Release),
        1 => (0..6 * SECOND).prop_map(Event::Wait),
    ];
    proptest::collection::vec(event, 0..60)
}

proptest! {
    /// Whatever happens in whatever order: the book never promises a CPU, a device or memory twice, its file reads back as
    /// itself, and a reservation that waits ends in time.
    #[test]
    fn nothing_is_promised_twice(events in events()) {
        let host = paper();
        let mut book = Book::default();
        let mut now = 0;
        for event in events {
            match event {
                Event::Reserve(name, vcpus, units, with_device) => {
                    let devices: &[u32] = if with_device { &[1] } else { &[] };
                    let request = named(&format!("vm{name}"), vm(vcpus, units * MIB2, devices));
                    let result = reserve(&mut book, &host, &request, now);
                    let holder = book.of(&request.name).is_some();
                    prop_assert!(result.is_ok() <= holder);
                    let in_use = matches!(
                        result,
                        Err(ReserveError::Place(PlaceError::Request(RequestError::InUse { .. })))
                    );
                    prop_assert!(!in_use || with_device);
                }
                Event::Appeared(vm) => {
                    let _ = book.appeared(&format!("vm{vm}"), vm as i32 + 1, None, now);
                }
                Event::Gone(vm) => drop(book.gone(&format!("vm{vm}"), vm as i32 + 1)),
                Event::Release(vm) => drop(book.release(&format!("vm{vm}"))),
                Event::Wait(ns) => {
                    now += ns;
                    book.expire(now);
                    prop_assert!(book.next_deadline_ns().is_none_or(|deadline| deadline > now));
                }
            }
            let mut cpus: Vec<u32> = book.all().flat_map(|one| one.placement.pins().map(|pin| pin.cpu)).collect();
            let count = cpus.len();
            cpus.sort_unstable();
            cpus.dedup();
            prop_assert_eq!(cpus.len(), count);
            for node in 0..2 {
                let nodes = book.all().flat_map(|one| &one.placement.guest_nodes);
                let memory: u64 = nodes.filter(|one| one.home == node).map(|node| node.memory_bytes).sum();
                prop_assert!(memory <= 64 * GIB);
            }
            let text = file::print(&book, "boot");
            prop_assert_eq!(file::parse(Path::new("x"), &text, "boot", now), Ok(book.clone()));
        }
    }
}

#[test]
fn there_are_as_many_reservations_as_the_limit_says_and_no_more() {
    let sets: Vec<String> = (0..5).map(|node| format!("{}-{}", node * 1024, node * 1024 + 1023)).collect();
    let nodes: Vec<Node> =
        sets.iter().map(|set| Node(Box::leak(set.clone().into_boxed_str()), 1 << 20, 0)).collect();
    let host = host(&nodes, &[]);
    let mut book = Book::default();
    for number in 0..MAX_RESERVATIONS {
        let request = named(&format!("vm{number}"), vm(1, MIB2, &[]));
        assert_eq!(reserve(&mut book, &host, &request, 0), Ok(number as u64));
    }
    assert_eq!(reserve(&mut book, &host, &vm(1, MIB2, &[]), 0), Err(ReserveError::TooMany));
    book.release("vm7").expect("released");
    assert!(reserve(&mut book, &host, &vm(1, MIB2, &[]), 0).is_ok());
}
