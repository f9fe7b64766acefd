//! vCPUs and memory over nodes that are given in an order of preference.

/// What a node has for a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// CPUs.
    pub cpus: u32,
    /// Memory, in units.
    pub units: u64,
}

impl Room {
    /// Can it be the home of a guest node with vCPUs? Such a node needs memory, too: Linux has no node without.
    pub fn both(&self) -> bool {
        self.cpus > 0 && self.units > 0
    }
}

/// What a node gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Position of the node.
    pub node: usize,
    /// vCPUs; none if it gives memory only.
    pub vcpus: u32,
    /// Memory, in units, at least one.
    pub units: u64,
}

/// Spreads a VM over nodes.
///
/// - The first nodes of `order` with CPUs and memory are used, as few as suffice, but at least `least` of them. Each gets a
///   vCPU and a unit, and the rest of the vCPUs in proportion to the free CPUs, of the memory in proportion to the vCPUs as
///   far as there is room.
/// - If there are more such nodes than vCPUs or units, or memory does not suffice, other nodes give memory only.
/// - If the first nodes are so small that there are more of them than units, those with most CPUs are used.
///
/// `None` if there is no way to give each vCPU a CPU, each unit room, and each node with vCPUs a unit.
pub fn spread(rooms: &[Room], order: &[usize], least: usize, vcpus: u32, units: u64) -> Option<Vec<Part>> {
    if vcpus == 0 {
        let mut parts = Vec::new();
        return (memory_only(rooms, order, &mut parts, units) == 0).then_some(parts);
    }
    let mut with_both: Vec<usize> = order.iter().copied().filter(|&at| rooms[at].both()).collect();
    let suffices = |nodes: &[usize]| {
        let mut sum = 0_u64;
        let enough = nodes.iter().position(|&at| {
            sum += u64::from(rooms[at].cpus);
            sum >= u64::from(vcpus)
        });
        enough.map(|last| (last + 1).max(least))
    };
    let mut count = suffices(&with_both)?;
    if count as u64 > units {
        let (_, rest) = with_both.split_at_mut(least);
        rest.sort_by_key(|&at| std::cmp::Reverse(rooms[at].cpus));
        count = suffices(&with_both)?;
    }
    let most = with_both.len().min(vcpus as usize).min(usize::try_from(units).unwrap_or(usize::MAX));
    if count > most {
        return None;
    }
    let memory = |nodes: &[usize]| nodes.iter().map(|&at| u128::from(rooms[at].units)).sum::<u128>();
    while count < most && memory(&with_both[..count]) < u128::from(units) {
        count += 1;
    }
    fill(rooms, order, &with_both[..count], vcpus, units)
}

/// Each of `nodes` gets a vCPU and a unit, and its part of the rest.
fn fill(rooms: &[Room], order: &[usize], nodes: &[usize], vcpus: u32, units: u64) -> Option<Vec<Part>> {
    let cpus: Vec<u64> = nodes.iter().map(|&at| u64::from(rooms[at].cpus)).collect();
    let (given, left) = one_and_more(u64::from(vcpus), &cpus, &cpus);
    debug_assert_eq!(left, 0, "the nodes have that many CPUs");
    let room: Vec<u64> = nodes.iter().map(|&at| rooms[at].units).collect();
    let (memory, left) = one_and_more(units, &given, &room);
    let part = |at: usize| Part { node: nodes[at], vcpus: given[at] as u32, units: memory[at] };
    let mut parts: Vec<Part> = (0..nodes.len()).map(part).collect();
    (memory_only(rooms, order, &mut parts, left) == 0).then_some(parts)
}

/// Divides `total` in proportion to weights, each part at least one and up to its limit. Weights and limits are at least one, and
/// `total` is one for each. Returns the parts, and what exceeds all limits.
fn one_and_more(total: u64, weights: &[u64], limits: &[u64]) -> (Vec<u64>, u64) {
    let sum: u128 = weights.iter().map(|&weight| u128::from(weight)).sum();
    let share = |at: usize| ((u128::from(total) * u128::from(weights[at]) / sum) as u64).min(limits[at]);
    let mut parts: Vec<u64> = (0..weights.len()).map(share).collect();
    if parts.contains(&0) {
        parts.fill(1);
    }
    let room: Vec<u64> = parts.iter().zip(limits).map(|(part, limit)| limit - part).collect();
    let (more, left) = proportional(total - parts.iter().sum::<u64>(), weights, &room);
    parts.iter_mut().zip(more).for_each(|(part, more)| *part += more);
    (parts, left)
}

/// Adds parts of memory only, of nodes that have none yet. What is left.
fn memory_only(rooms: &[Room], order: &[usize], parts: &mut Vec<Part>, mut units: u64) -> u64 {
    for &node in order {
        let given = rooms[node].units.min(units);
        if given > 0 && !parts.iter().any(|part| part.node == node) {
            parts.push(Part { node, vcpus: 0, units: given });
            units -= given;
        }
    }
    units
}

/// Divides `total` in proportion to weights, each part up to its limit; what a limit or rounding leaves goes to the others.
/// Returns the parts, and what exceeds all limits.
fn proportional(mut total: u64, weights: &[u64], limits: &[u64]) -> (Vec<u64>, u64) {
    let mut parts = vec![0_u64; weights.len()];
    loop {
        let open: Vec<usize> =
            (0..parts.len()).filter(|&at| parts[at] < limits[at] && weights[at] > 0).collect();
        let sum: u128 = open.iter().map(|&at| u128::from(weights[at])).sum();
        if total == 0 || open.is_empty() {
            return (parts, total);
        }
        let divided = total;
        for &at in &open {
            let share = (u128::from(divided) * u128::from(weights[at]) / sum) as u64;
            let share = share.min(limits[at] - parts[at]);
            parts[at] += share;
            total -= share;
        }
        if total == divided {
            // Less than one each: the first ones get it.
            for &at in open.iter().take(total as usize) {
                parts[at] += 1;
                total -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rooms(of: &[(u32, u64)]) -> Vec<Room> {
        of.iter().map(|&(cpus, units)| Room { cpus, units }).collect()
    }

    fn shown(parts: Option<Vec<Part>>) -> Option<Vec<(usize, u32, u64)>> {
        Some(parts?.iter().map(|part| (part.node, part.vcpus, part.units)).collect())
    }

    #[test]
    fn as_few_nodes_as_suffice_and_each_in_proportion() {
        let rooms = rooms(&[(8, 100), (8, 100), (4, 100)]);
        assert_eq!(shown(spread(&rooms, &[1, 0, 2], 0, 8, 50)), Some(vec![(1, 8, 50)]));
        assert_eq!(shown(spread(&rooms, &[1, 0, 2], 0, 12, 60)), Some(vec![(1, 6, 30), (0, 6, 30)]));
        assert_eq!(shown(spread(&rooms, &[2, 1, 0], 0, 12, 60)), Some(vec![(2, 4, 20), (1, 8, 40)]));
        assert_eq!(shown(spread(&rooms, &[1, 0, 2], 2, 2, 2)), Some(vec![(1, 1, 1), (0, 1, 1)]), "least");
        assert_eq!(spread(&rooms, &[0, 1, 2], 0, 21, 60), None);
        assert_eq!(spread(&rooms, &[0, 1, 2], 0, 1, 301), None);
    }

    #[test]
    fn memory_follows_the_vcpus_as_far_as_there_is_room() {
        let rooms = rooms(&[(8, 10), (8, 100), (0, 50)]);
        assert_eq!(shown(spread(&rooms, &[0, 1, 2], 2, 8, 60)), Some(vec![(0, 4, 10), (1, 4, 50)]));
        // One vCPU cannot be on two nodes: the other ones give memory only.
        let memory = Some(vec![(0, 1, 10), (1, 0, 100), (2, 0, 5)]);
        assert_eq!(shown(spread(&rooms, &[0, 1, 2], 0, 1, 115)), memory);
        // Its memory needs a second node, and its vCPUs can be there, too.
        assert_eq!(shown(spread(&rooms, &[0, 1, 2], 0, 2, 60)), Some(vec![(0, 1, 10), (1, 1, 50)]));
    }

    #[test]
    fn nodes_with_vcpus_have_memory() {
        // Three units: not four nodes of two CPUs, but two of them and the large one.
        let rooms = rooms(&[(2, 9), (2, 9), (2, 9), (2, 9), (4, 9), (9, 0)]);
        let order = [0, 1, 2, 3, 4, 5];
        assert_eq!(shown(spread(&rooms, &order, 0, 8, 3)), Some(vec![(4, 4, 1), (0, 2, 1), (1, 2, 1)]));
        assert_eq!(spread(&rooms, &order, 0, 8, 2), None);
        assert_eq!(shown(spread(&rooms, &order, 0, 0, 2)), Some(vec![(0, 0, 2)]));
    }

    #[test]
    fn proportions_are_kept_and_limits_too() {
        assert_eq!(proportional(10, &[1, 1], &[100, 100]), (vec![5, 5], 0));
        assert_eq!(proportional(10, &[3, 1], &[100, 100]), (vec![8, 2], 0));
        assert_eq!(proportional(10, &[1, 1], &[2, 100]), (vec![2, 8], 0));
        assert_eq!(proportional(10, &[1, 1], &[2, 3]), (vec![2, 3], 5));
        assert_eq!(proportional(2, &[1, 1, 1], &[9, 9, 9]), (vec![1, 1, 0], 0));
        assert_eq!(proportional(u64::MAX, &[u64::MAX, 1], &[u64::MAX, 1]).1, 0);
    }
}
