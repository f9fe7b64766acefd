//! Something that is done with a VM: it is wanted, it begins, and it ends.
//!
//! ```text
//!   wanted ──begin──▶ begun, under an id ──end, by that id──▶ last
//! ```
//!
//! The command that begins it has the id, and so does its outcome. An outcome with another id is of something that is not waited for any
//! more, as its VM is gone: whatever has the VM's name or process now is not meant.

use vnuma_model::VmId;

/// The id of a task that has begun. No other task has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TaskId {
    /// The VM.
    pub vm: VmId,
    /// Counts the tasks of all VMs.
    pub number: u64,
}

/// A task: `W` is what is wanted, `B` what is known of it while it is under way, and `E` how it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task<W = (), B = W, E = ()> {
    /// What is to begin next.
    pub wanted: Option<W>,
    begun: Option<(TaskId, B)>,
    /// The last one that has ended.
    pub last: Option<E>,
}

impl<W, B, E> Default for Task<W, B, E> {
    fn default() -> Self {
        Self { wanted: None, begun: None, last: None }
    }
}

impl<W, B, E> Task<W, B, E> {
    /// A task that is wanted and has not begun.
    pub fn wanted(what: W) -> Self {
        Self { wanted: Some(what), ..Self::default() }
    }

    /// The task begins.
    pub fn begin(&mut self, id: TaskId, what: B) {
        (self.wanted, self.begun) = (None, Some((id, what)));
    }

    /// What is under way.
    pub fn begun(&self) -> Option<&B> {
        self.begun.as_ref().map(|(_, what)| what)
    }

    /// The id of the one that is under way.
    pub fn id(&self) -> Option<TaskId> {
        self.begun.as_ref().map(|(id, _)| *id)
    }

    /// Is it under way?
    pub fn is_under_way(&self) -> bool {
        self.begun.is_some()
    }

    /// Is it under way, and has this id?
    pub fn is(&self, id: TaskId) -> bool {
        self.begun.as_ref().is_some_and(|(begun, _)| *begun == id)
    }

    /// What is known of the task that is under way, if it has this id.
    pub fn get_mut(&mut self, id: TaskId) -> Option<&mut B> {
        self.begun.as_mut().filter(|(begun, _)| *begun == id).map(|(_, what)| what)
    }

    /// Ends the task that is under way, if it has this id, and returns what was known of it.
    pub fn end(&mut self, id: TaskId) -> Option<B> {
        self.begun.take_if(|(begun, _)| *begun == id).map(|(_, what)| what)
    }

    /// It is not wanted any more and, if it is under way, not waited for.
    pub fn give_up(&mut self) {
        (self.wanted, self.begun) = (None, None);
    }
}

impl<W, E> Task<W, W, E> {
    /// What is wanted or under way.
    pub fn what(&self) -> Option<&W> {
        self.begun().or(self.wanted.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_under_way_ends_and_only_once() {
        let id = |number| TaskId { vm: 1, number };
        let mut task: Task<u32> = Task::wanted(7);
        assert_eq!((task.end(id(1)), task.what()), (None, Some(&7)), "it has not begun");
        task.begin(id(1), 7);
        assert_eq!((task.wanted, task.is(id(1)), task.is(id(2))), (None, true, false));
        assert_eq!((task.end(id(2)), task.get_mut(id(2))), (None, None), "of another one");
        assert_eq!((task.end(id(1)), task.end(id(1)), task.is_under_way()), (Some(7), None, false));
        task.begin(id(3), 8);
        task.give_up();
        assert_eq!((task.end(id(3)), task.what()), (None, None), "nobody waits for it");
    }
}
