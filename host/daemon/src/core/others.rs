//! Threads of VMs that run no vCPU: they follow the vCPUs that a policy confines.

use super::{
    Core,
    event::{Followed, Level},
};
use vnuma_model::CpuSet;
use vnuma_policy::world::TaskId;

impl Core {
    /// These threads were confined to the CPUs of their vCPUs, or could not be.
    pub(super) fn followed(&mut self, task: TaskId, outcome: Result<Followed, String>) {
        let Some((_, vm)) = self.world.vm_mut(task.vm) else { return };
        let name = vm.name().to_owned();
        let others = &mut vm.scheduling.others;
        let Some(begun) = others.follow.end(task) else { return };
        others.resyncs = 0;
        let line = match outcome {
            Ok(Followed { threads, inherited }) => {
                let before = std::mem::replace(&mut others.kept, begun);
                (others.threads, others.inherited, others.problem) = (threads, inherited, None);
                (before != others.kept).then(|| (Level::Info, kept(&others.kept, threads)))
            }
            Err(problem) => {
                // It is tried again later.
                let before = others.problem.replace(problem.clone());
                let line = format!("threads that run no vCPU cannot follow its vCPUs: {problem}");
                (before.as_ref() != Some(&problem)).then_some((Level::Warn, line))
            }
        };
        if let Some((level, line)) = line {
            self.log(task.vm, level, format!("{name}: {line}"));
        }
        self.recount(task.vm);
    }
}

fn kept(cpus: &Option<CpuSet>, threads: usize) -> String {
    match cpus {
        Some(cpus) => format!("{threads} threads that run no vCPU follow its vCPUs to CPUs {cpus}"),
        None => "its threads that run no vCPU have their operators' CPUs again".to_owned(),
    }
}
