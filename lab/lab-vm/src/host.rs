//! What lab-vm needs to know of the server it runs on.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// A node of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostNode {
    /// Its number.
    pub id: usize,
    /// Its CPUs.
    pub cpus: Vec<usize>,
    /// Distances to the nodes of the server, in the order of [`read_nodes`].
    pub distances: Vec<u8>,
}

/// Reads the nodes that have CPUs and memory from sysfs under `root`.
pub fn read_nodes(root: &Path) -> Result<Vec<HostNode>> {
    let directory = root.join("sys/devices/system/node");
    let read = |name: &str| {
        let path = directory.join(name);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Ok::<_, anyhow::Error>((path.display().to_string(), text.trim().to_owned()))
    };
    let list = |name: &str| {
        let (path, text) = read(name)?;
        parse_list(&text).with_context(|| format!("{path}: \"{text}\""))
    };
    let online = list("online")?;
    let memory = list("has_memory")?;
    let mut nodes = Vec::new();
    for (position, &id) in online.iter().enumerate() {
        let cpus = list(&format!("node{id}/cpulist"))?;
        let (path, text) = read(&format!("node{id}/distance"))?;
        let distances: Result<Vec<u8>, _> = text.split_whitespace().map(str::parse).collect();
        let distances = distances.with_context(|| format!("{path}: \"{text}\""))?;
        ensure!(
            distances.len() == online.len(),
            "{path}: {} values for {} nodes",
            distances.len(),
            online.len()
        );
        if !cpus.is_empty() && memory.contains(&id) {
            nodes.push((position, HostNode { id, cpus, distances }));
        }
    }
    ensure!(!nodes.is_empty(), "{}: no node has CPUs and memory", directory.display());
    let kept: Vec<usize> = nodes.iter().map(|(position, _)| *position).collect();
    let keep = |(_, node): (usize, HostNode)| HostNode {
        distances: kept.iter().map(|&position| node.distances[position]).collect(),
        ..node
    };
    Ok(nodes.into_iter().map(keep).collect())
}

/// `0-3,8` and the empty list.
pub fn parse_list(text: &str) -> Result<Vec<usize>> {
    /// More CPUs or nodes than any kernel has.
    const LIMIT: usize = 1 << 16;
    let mut values = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse()?, last.parse()?);
        ensure!(first <= last && last < LIMIT, "\"{part}\" is no range");
        values.extend(first..=last);
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join("sys/devices/system/node").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn nodes_without_cpus_or_memory_are_no_homes() {
        let root = tree(&[
            ("online", "0-2\n"),
            ("has_memory", "0,2\n"),
            ("node0/cpulist", "0-1,4\n"),
            ("node1/cpulist", "2\n"),
            ("node2/cpulist", "3\n"),
            ("node0/distance", "10 20 30\n"),
            ("node1/distance", "20 10 40\n"),
            ("node2/distance", "30 40 10\n"),
        ]);
        let nodes = read_nodes(root.path()).unwrap();
        let expected = [
            HostNode { id: 0, cpus: vec![0, 1, 4], distances: vec![10, 30] },
            HostNode { id: 2, cpus: vec![3], distances: vec![30, 10] },
        ];
        assert_eq!(nodes, expected);
    }

    #[test]
    fn strange_files_are_named() {
        let root = tree(&[("online", "0\n"), ("has_memory", "0\n"), ("node0/cpulist", "9-1\n")]);
        let error = format!("{:#}", read_nodes(root.path()).unwrap_err());
        assert!(error.contains("node0/cpulist: \"9-1\""), "{error}");
        assert!(parse_list("0-99999999").is_err());
        assert!(parse_list("a").is_err());
        assert!(parse_list("").unwrap().is_empty());
    }
}
