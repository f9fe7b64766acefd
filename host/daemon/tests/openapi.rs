//! The description of the API: committed as it is made, complete, and served.

mod common;

use common::{Daemon, http::ask};
use serde_json::Value;
use std::collections::BTreeSet;

const COMMITTED: &str = include_str!("../../../docs/openapi.json");
const MANUAL: &str = include_str!("../../../docs/vnumad.md");

/// `METHOD /path` of each operation.
fn described() -> BTreeSet<String> {
    let document: Value = serde_json::from_str(vnuma_daemon::openapi_document()).expect("JSON");
    let paths = document["paths"].as_object().expect("paths").iter();
    paths
        .flat_map(|(path, item)| {
            let methods = item.as_object().expect("operations").keys();
            methods.map(move |method| format!("{} {path}", method.to_uppercase())).collect::<Vec<_>>()
        })
        .collect()
}

/// The same of the manual's table, whose `NAME` is a parameter.
fn in_the_manual() -> BTreeSet<String> {
    let (_, section) = MANUAL.split_once("\n## API\n").expect("a section");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")).map(|row| row.split(" |").next());
    let mut found = BTreeSet::new();
    for row in rows.flatten() {
        let mut last = String::new();
        for part in row.split('`').filter(|part| part.contains('/')) {
            let (before, _) = last.rsplit_once('/').unwrap_or_default();
            let full = part.replacen("...", before, 1).replace("NAME", "{name}");
            last = full.split('?').next().unwrap_or_default().to_owned();
            found.insert(last.clone());
        }
    }
    found
}

#[test]
fn the_committed_description_is_the_one_that_is_made() {
    let made = vnuma_daemon::openapi_document();
    assert!(
        made == COMMITTED,
        "docs/openapi.json is not what vnumad says; make it anew: cargo run -p vnumad -- --print-openapi > docs/openapi.json"
    );
    let document: Value = serde_json::from_str(made).expect("JSON");
    assert_eq!(document["openapi"], "3.1.0");
}

#[test]
fn the_manual_lists_what_is_described() {
    let (manual, described) = (in_the_manual(), described());
    let differ: Vec<_> = manual.symmetric_difference(&described).collect();
    assert!(differ.is_empty() && described.len() > 20, "{differ:?}");
}

/// Only what is described is served: routes have no other way in.
#[test]
fn nothing_is_served_without_a_description() {
    let source = include_str!("../src/server/api.rs");
    assert!(
        source.contains(".routes(serve::<") && !source.contains(".route("),
        "a route without a description"
    );
}

#[test]
fn what_is_described_is_served() {
    let daemon = Daemon::start();
    for operation in described() {
        let (method, path) = operation.split_once(' ').expect("a method");
        if path == "/v1/watch" || path == "/v1/observations" || path == "/metrics" {
            // These have no end, or are no JSON; common tests ask for them.
            continue;
        }
        let (status, answer) = ask(&daemon.socket, method, &path.replace("{name}", "nobody"), "");
        let message = answer["message"].as_str().unwrap_or_default();
        assert!(
            !message.starts_with("no such path") && !message.contains("is not possible on"),
            "{operation}: {message}"
        );
        let expected: &[u16] = match (method, path.contains("{name}")) {
            ("GET", false) => &[200],
            ("GET", true) => &[404],
            _ => &[400, 404],
        };
        assert!(expected.contains(&status), "{operation}: {status} {answer}");
    }
    let (status, served) = ask(&daemon.socket, "GET", "/openapi.json", "");
    assert_eq!(status, 200);
    assert_eq!(served, serde_json::from_str::<Value>(COMMITTED).expect("JSON"));
}

/// Each reference leads to a schema, and each answer and request has one.
#[test]
fn the_description_is_closed() {
    let document: Value = serde_json::from_str(COMMITTED).expect("JSON");
    fn references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(map) => {
                found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
                map.values().for_each(|value| references(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    assert!(found.len() > 30, "{found:?}");
    for reference in found {
        let pointer = reference.strip_prefix('#').expect("within the document");
        assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
    }
}
