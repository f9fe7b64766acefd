//! The API: HTTP requests become requests to the core. What is allowed is decided here.

use super::{
    caught::caught,
    context::{Asker, BODY_LIMIT, Client, Context, Failure, ask},
    listener::ApiListener,
    metrics::{__path_metrics, metrics},
    openapi::{__path_openapi, Base, openapi},
    placements::{PlacementError, Placements},
    serve::{Input, serve},
    streams::{__path_record, __path_watch, record, watch},
};
use crate::{
    core::{
        Refusal, ReplyTo,
        event::Request,
        uses::{AT_ONCE, VmUse},
    },
    shell::inbox::ApiRequest,
};
use axum::{
    Router,
    extract::{DefaultBodyLimit, connect_info::Connected},
    middleware::from_fn,
    serve::IncomingStream,
};
use std::sync::Arc;
use tokio::sync::oneshot;
use utoipa::OpenApi;
use utoipa_axum::{
    router::{OpenApiRouter, UtoipaMethodRouter},
    routes,
};
use vnuma_api::{
    ErrorKind, HostTopology, MemoryPolicyRequest, MigrateRequest, MoveRequest, PolicyRequest, RehomeRequest,
    ReplugRequest, ResizeRequest,
    operation::{self as op, Operation},
};
use vnuma_observe::{location::monotonic_ns, read_host_topology};
use vnuma_policy::world::{RehomeWish, ResizeWish, WantedSize};

impl Connected<IncomingStream<'_, ApiListener>> for Client {
    fn connect_info(stream: IncomingStream<'_, ApiListener>) -> Self {
        stream.io().of.clone()
    }
}

/// All paths, each with its description: the operations with their handlers, and what is no operation.
pub(super) fn routes() -> OpenApiRouter<Context> {
    OpenApiRouter::with_openapi(Base::openapi())
        .routes(serve::<op::Hardware, _, _>(hardware))
        .routes(serve::<op::Devices, _, _>(async |asker, (), ()| {
            with_placements(&asker, |placements, uses, now_ns| placements.devices(uses, now_ns)).await
        }))
        .routes(serve::<op::Capacity, _, _>(async |asker, (), ()| {
            with_placements(&asker, |placements, uses, now_ns| placements.capacity(uses, now_ns)).await
        }))
        .routes(serve::<op::Daemon, _, _>(async |asker, (), ()| ask(&asker, ApiRequest::Daemon).await))
        .routes(serve::<op::List, _, _>(async |asker, (), ()| each(&asker, ApiRequest::Show).await))
        .routes(serve::<op::Show, _, _>(async |asker, vm, ()| {
            Ok(ask(&asker, |reply| ApiRequest::Show(vm, reply)).await??)
        }))
        .routes(of_core::<op::Attach>(|vm, body, to| {
            let on_arrival = body.is_some_and(|body| body.on_arrival);
            Ok(if on_arrival { Request::AttachOnArrival(vm, to) } else { Request::Attach(vm, to) })
        }))
        .routes(of_core::<op::Detach>(|vm, (), to| Ok(Request::Detach(vm, to))))
        .routes(of_core::<op::MoveVcpu>(|vm, MoveRequest { vcpu, node }, to| {
            Ok(Request::Move(vm, vcpu, node, to))
        }))
        .routes(of_core::<op::Replug>(|vm, ReplugRequest { vcpu }, to| Ok(Request::Replug(vm, vcpu, to))))
        .routes(serve::<op::Policies, _, _>(async |asker, (), ()| each(&asker, ApiRequest::Scheduling).await))
        .routes(serve::<op::ShowPolicy, _, _>(async |asker, vm, ()| {
            Ok(ask(&asker, |reply| ApiRequest::Scheduling(vm, reply)).await??)
        }))
        .routes(of_core::<op::SetPolicy>(|vm, PolicyRequest { policy }, to| {
            Ok(Request::SetPolicy(vm, known(policy.parse())?, to))
        }))
        .routes(of_core::<op::ShowMemory>(|vm, (), to| Ok(Request::ShowMemory(vm, to))))
        .routes(of_core::<op::SetMemoryPolicy>(|vm, MemoryPolicyRequest { policy }, to| {
            Ok(Request::SetMemoryPolicy(vm, known(policy.parse())?, to))
        }))
        .routes(of_core::<op::ShowRehome>(|vm, (), to| Ok(Request::ShowRehome(vm, to))))
        .routes(of_core::<op::Rehome>(|vm, body, to| {
            let RehomeRequest { guest_node, node, dry_run, move_pinned } = body;
            let wish = RehomeWish { guest_node, node, dry_run, move_pinned, why: None };
            Ok(Request::Rehome(vm, wish, to))
        }))
        .routes(of_core::<op::StopRehome>(|vm, (), to| Ok(Request::StopRehome(vm, to))))
        .routes(of_core::<op::ShowSizes>(|vm, (), to| Ok(Request::ShowSizes(vm, to))))
        .routes(of_core::<op::Resize>(|vm, body, to| Ok(Request::Resize(vm, wanted_size(body)?, to))))
        .routes(of_core::<op::StopResize>(|vm, (), to| Ok(Request::StopResize(vm, to))))
        .routes(of_core::<op::ShowMigration>(|vm, (), to| Ok(Request::ShowMigration(vm, to))))
        .routes(of_core::<op::Migrate>(|vm, MigrateRequest { destination, post_copy }, to| {
            Ok(Request::Migrate(vm, destination, post_copy, to))
        }))
        .routes(of_core::<op::CancelMigration>(|vm, (), to| Ok(Request::CancelMigration(vm, to))))
        .routes(serve::<op::Placements, _, _>(async |asker, (), ()| {
            with_placements(&asker, |placements, uses, now_ns| placements.list(uses, now_ns)).await
        }))
        .routes(serve::<op::Place, _, _>(async |asker, (), wanted| {
            with_placements(&asker, move |placements, uses, now_ns| placements.place(uses, &wanted, now_ns))
                .await
        }))
        .routes(serve::<op::Release, _, _>(async |asker, vm, ()| {
            with_placements(&asker, move |placements, uses, now_ns| placements.release(uses, &vm, now_ns))
                .await
        }))
        .routes(routes!(record))
        .routes(routes!(watch))
        .routes(routes!(metrics))
        .routes(routes!(openapi))
}

/// The server of all paths.
pub(crate) fn router(context: Context) -> Router {
    let (router, _) = routes().split_for_parts();
    router
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .layer(from_fn(caught))
        .with_state(context)
}

/// Makes the core's request of the name of a VM, a body, and who gets the answer.
type MakeRequest<O> =
    fn(String, <O as Operation>::Input, ReplyTo<<O as Operation>::Output>) -> Result<Request, Failure>;

/// The route of an operation that the core carries out.
fn of_core<O>(request: MakeRequest<O>) -> UtoipaMethodRouter<Context>
where
    O: for<'a> Operation<Subject<'a> = &'a str> + 'static,
    O::Input: Input,
{
    serve::<O, _, _>(move |asker, vm, input| async move {
        let ((reply, answer), ticket) = (oneshot::channel(), asker.ticket());
        let requester = ticket.requester.clone();
        // A client that is gone is no error.
        let give = |answer| drop((reply.send(answer), ticket));
        let wanted = request(vm, input, ReplyTo::new(give).of(requester))?;
        asker.request(ApiRequest::Act(wanted)).await?;
        Ok(answer.await.map_err(|_| Refusal::ShuttingDown)??)
    })
}

/// Asks for each VM. One request for each, so that the core can handle events in between.
async fn each<T>(
    asker: &Asker,
    of: fn(String, oneshot::Sender<Result<T, Refusal>>) -> ApiRequest,
) -> Result<Vec<T>, Failure> {
    let mut all = Vec::new();
    for name in ask(asker, ApiRequest::Names).await? {
        match ask(asker, |reply| of(name, reply)).await? {
            Ok(shown) => all.push(shown),
            // The VM is gone by now.
            Err(Refusal::NoVm(_) | Refusal::Ended { .. }) => {}
            Err(refusal) => return Err(refusal.into()),
        }
    }
    Ok(all)
}

async fn hardware(asker: Asker, (): (), (): ()) -> Result<HostTopology, Failure> {
    let (job, root) = (asker.job().await, asker.context.root.clone());
    Ok(asker.run(job, move || read_host_topology(&root)).await?.map_err(Refusal::from)?)
}

/// What all VMs have of the host. One request for some of them at a time, so that the core can handle events in between.
async fn uses(asker: &Asker) -> Result<Vec<VmUse>, Failure> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let some = ask(asker, |reply| ApiRequest::Uses(after, reply)).await?;
        let ends = some.len() < AT_ONCE;
        after = some.last().map(|(id, _)| *id);
        all.extend(some.into_iter().map(|(_, of)| of));
        if ends {
            return Ok(all);
        }
    }
}

/// A policy that is known by this name.
fn known<T, E: ToString>(policy: Result<T, E>) -> Result<T, Failure> {
    policy.map_err(|error| Failure::bad_request(error.to_string()))
}

fn wanted_size(body: ResizeRequest) -> Result<ResizeWish, Failure> {
    let ResizeRequest { guest_node, size_bytes, auto, dry_run } = body;
    let size = match (size_bytes, auto) {
        (Some(bytes), None) => WantedSize::Fixed(bytes),
        (None, Some(auto)) => WantedSize::Auto(auto.least_bytes, auto.most_bytes),
        _ => return Err(Failure::bad_request("expected either size_bytes or auto".to_owned())),
    };
    Ok(ResizeWish { guest_node, size, dry_run })
}

/// What has to do with reservations: it knows which VMs there are, and may wait for files.
async fn with_placements<T: Send + 'static>(
    asker: &Asker,
    run: impl FnOnce(&Placements, &[VmUse], u64) -> Result<T, PlacementError> + Send + 'static,
) -> Result<T, Failure> {
    let job = asker.job().await;
    let (uses, placements) = (uses(asker).await?, Arc::clone(&asker.context.placements));
    Ok(asker.run(job, move || run(&placements, &uses, monotonic_ns())).await??)
}

async fn unknown(request: axum::extract::Request) -> Failure {
    let message = format!("no such path: {}", request.uri().path());
    Failure::new(ErrorKind::NotFound, message)
}

async fn wrong_method(request: axum::extract::Request) -> Failure {
    Failure::bad_request(format!("{} is not possible on {}", request.method(), request.uri().path()))
}
