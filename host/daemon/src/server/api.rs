//! The API: HTTP requests become requests to the core. What is allowed is decided here.

use super::{
    limits::PerUser,
    listener::ApiListener,
    metrics::{__path_metrics, Metrics, metrics},
    openapi::{__path_openapi, Base, Failures, Refusals, openapi},
    placements::{PlacementError, Placements},
    rights::Peer,
    streams::{__path_record, __path_watch, record, watch},
};
use crate::{
    core::{
        Refusal,
        event::{Answer as CoreAnswer, Request},
        sanitize,
        uses::VmUse,
    },
    shell::inbox::{ApiRequest, Inbox},
};
use axum::{
    Json, Router,
    body::Bytes,
    extract::{
        ConnectInfo, DefaultBodyLimit, FromRequestParts, Path, State, connect_info::Connected,
        rejection::BytesRejection,
    },
    http::{StatusCode, request::Parts},
    response::{IntoResponse, Response},
    serve::IncomingStream,
};
use serde::de::DeserializeOwned;
use std::{path::PathBuf, sync::Arc};
use tokio::sync::oneshot;
use utoipa::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes};
use vnuma_api::{
    ApiError, AttachRequest, CAPACITY, DAEMON, DEVICES, Devices, ErrorKind, HARDWARE, HostTopology,
    MemoryPolicyRequest, MigrateRequest, Migration, MoveRequest, NodeFree, PLACEMENTS, POLICIES,
    PlaceRequest, Placed, PolicyRequest, Rehome, RehomeRequest, ReplugRequest, Replugged, Reserved,
    ResizeRequest, Scheduling, Sizes, VMS, Vm, VmMemory,
};
use vnuma_observe::{location::monotonic_ns, read_host_topology};
use vnuma_policy::{
    repatriation::UnknownMemoryPolicy,
    scheduling::UnknownPolicy,
    world::{RehomeWish, ResizeWish, WantedSize},
};

/// No request needs more.
const BODY_LIMIT: usize = 4096;

impl Connected<IncomingStream<'_, ApiListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, ApiListener>) -> Self {
        stream.io().peer
    }
}

/// State that the handlers share.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) root: PathBuf,
    /// Name of the group that may act, if there is one.
    pub(crate) act_group: Option<String>,
    pub(crate) watchers: PerUser,
    pub(crate) placements: Arc<Placements>,
    pub(crate) metrics: Arc<Metrics>,
}

type Answer<T> = Result<Json<T>, Failure>;

/// A failed request.
pub(crate) struct Failure(ApiError);

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self(refusal.into())
    }
}

impl From<PlacementError> for Failure {
    fn from(error: PlacementError) -> Self {
        Self(ApiError { error: error.kind(), message: error.to_string() })
    }
}

impl Failure {
    pub(super) fn bad_request(message: String) -> Self {
        Self(ApiError { error: ErrorKind::BadRequest, message })
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = match self.0.error {
            ErrorKind::BadRequest => StatusCode::BAD_REQUEST,
            ErrorKind::Forbidden => StatusCode::FORBIDDEN,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            ErrorKind::Busy => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Vm => StatusCode::BAD_GATEWAY,
        };
        let ApiError { error, message } = self.0;
        (status, Json(ApiError { error, message: sanitize(&message) })).into_response()
    }
}

/// The VM that a path names.
struct VmName(String);

impl FromRequestParts<Context> for VmName {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, context: &Context) -> Result<Self, Failure> {
        match Path::from_request_parts(parts, context).await {
            Ok(Path(name)) => Ok(Self(name)),
            Err(_) => {
                let path = parts.uri.path();
                Err(Failure::bad_request(format!("{path}: the name of the VM is not UTF-8")))
            }
        }
    }
}

/// The right to act. A handler that takes it is only for peers that have it.
struct MayAct;

impl FromRequestParts<Context> for MayAct {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, context: &Context) -> Result<Self, Failure> {
        let ConnectInfo(peer) = ConnectInfo::<Peer>::from_request_parts(parts, context)
            .await
            .map_err(|_| Failure::bad_request("it is not known who asks".to_owned()))?;
        if peer.may_act {
            return Ok(Self);
        }
        let act = match parts.uri.path().rsplit('/').next() {
            Some("attach") => "attach",
            Some("detach") => "detach",
            Some("cancel") => "cancelling a migration",
            Some("move") => "move",
            Some("replug") => "replug",
            Some("policy") => "setting a policy",
            Some("memory") => "setting a memory policy",
            Some("rehome") => "giving a guest node another home",
            Some("resize") => "sizing a guest node",
            Some("stop") => "stopping a change of a guest node",
            Some("placements") => "placing a VM",
            Some("release") => "releasing a reservation",
            _ => "acting",
        };
        let who = match &context.act_group {
            None => "root or the user that vnumad runs as".to_owned(),
            Some(group) => {
                format!("root, the user that vnumad runs as, or a member of group `{group}` (api.act_group)")
            }
        };
        Err(Refusal::Forbidden { act, who, uid: peer.uid }.into())
    }
}

/// The right to have a VM's memory sent to another host, which is not the group's.
struct MaySend;

impl FromRequestParts<Context> for MaySend {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, context: &Context) -> Result<Self, Failure> {
        let ConnectInfo(peer) = ConnectInfo::<Peer>::from_request_parts(parts, context)
            .await
            .map_err(|_| Failure::bad_request("it is not known who asks".to_owned()))?;
        if peer.may_send {
            return Ok(Self);
        }
        let who = "root or the user that vnumad runs as".to_owned();
        Err(Refusal::Forbidden { act: "migrate", who, uid: peer.uid }.into())
    }
}

/// All paths, each with its description.
pub(super) fn routes() -> OpenApiRouter<Context> {
    OpenApiRouter::with_openapi(Base::openapi())
        .routes(routes!(hardware))
        .routes(routes!(devices))
        .routes(routes!(capacity))
        .routes(routes!(daemon))
        .routes(routes!(list))
        .routes(routes!(show))
        .routes(routes!(attach))
        .routes(routes!(detach))
        .routes(routes!(move_vcpu))
        .routes(routes!(replug))
        .routes(routes!(show_policy, set_policy))
        .routes(routes!(show_memory, set_memory_policy))
        .routes(routes!(show_rehome, rehome))
        .routes(routes!(stop_rehome))
        .routes(routes!(show_sizes, resize))
        .routes(routes!(stop_resize))
        .routes(routes!(show_migration, migrate))
        .routes(routes!(cancel_migration))
        .routes(routes!(policies))
        .routes(routes!(placements, place))
        .routes(routes!(release))
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
        .with_state(context)
}

/// Asks the core's thread.
pub(super) async fn ask<T>(
    context: &Context,
    make: impl FnOnce(oneshot::Sender<T>) -> ApiRequest,
) -> Result<T, Failure> {
    let (reply, answer) = oneshot::channel();
    context.inbox.request(make(reply))?;
    answer.await.map_err(|_| Refusal::ShuttingDown.into())
}

async fn act(context: &Context, wanted: Request) -> Result<CoreAnswer, Failure> {
    Ok(ask(context, |reply| ApiRequest::Act(wanted, reply)).await??)
}

/// The answer to everything but a replug and policies.
async fn act_on_vm(context: &Context, wanted: Request) -> Answer<Vm> {
    match act(context, wanted).await? {
        CoreAnswer::Vm(vm) => Ok(Json(*vm)),
        CoreAnswer::Replugged(replugged) => Ok(Json(replugged.vm)),
        CoreAnswer::Scheduling(_)
        | CoreAnswer::Memory(_)
        | CoreAnswer::Rehome(_)
        | CoreAnswer::Sizes(_)
        | CoreAnswer::Migration(_) => Err(Refusal::ShuttingDown.into()),
    }
}

#[utoipa::path(
    get,
    path = HARDWARE,
    operation_id = "hardware",
    description = "The host, read again for the request.",
    responses((status = 200, description = "The answer", body = HostTopology), Failures),
)]
async fn hardware(State(context): State<Context>) -> Answer<HostTopology> {
    let read = tokio::task::spawn_blocking(move || read_host_topology(&context.root)).await;
    let topology = read.map_err(|_| Refusal::ShuttingDown)?.map_err(Refusal::from)?;
    Ok(Json(topology))
}

#[utoipa::path(
    get,
    path = DAEMON,
    operation_id = "daemon",
    description = "vnumad itself.",
    responses((status = 200, description = "The answer", body = vnuma_api::Daemon), Failures),
)]
async fn daemon(State(context): State<Context>) -> Answer<vnuma_api::Daemon> {
    ask(&context, ApiRequest::Daemon).await.map(Json)
}

#[utoipa::path(
    get,
    path = VMS,
    operation_id = "list",
    description = "All VMs.",
    responses((status = 200, description = "The answer", body = Vec<Vm>), Failures),
)]
async fn list(State(context): State<Context>) -> Answer<Vec<Vm>> {
    // One request for each VM, so that the core can handle events in between.
    let mut vms = Vec::new();
    for name in ask(&context, ApiRequest::Names).await? {
        match ask(&context, |reply| ApiRequest::Show(name, reply)).await? {
            Ok(vm) => vms.push(vm),
            // The VM is gone meanwhile.
            Err(Refusal::NoVm(_)) => {}
            Err(refusal) => return Err(refusal.into()),
        }
    }
    Ok(Json(vms))
}

#[utoipa::path(
    get,
    path = "/v1/vms/{name}",
    operation_id = "show",
    description = "A VM.",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "The answer", body = Vm), Failures),
)]
async fn show(State(context): State<Context>, VmName(vm): VmName) -> Answer<Vm> {
    Ok(Json(ask(&context, |reply| ApiRequest::Show(vm, reply)).await??))
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/attach",
    operation_id = "attach",
    description = "Plug a topology channel into the VM and publish its topology.",
    params(("name" = String, Path, description = "Name of the VM")),
    request_body = Option<AttachRequest>,
    responses((status = 200, description = "It was done", body = Vm), Refusals),
)]
async fn attach(
    _: MayAct,
    State(context): State<Context>,
    VmName(vm): VmName,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Vm> {
    let AttachRequest { on_arrival } = match &body {
        Ok(body) if body.is_empty() => AttachRequest::default(),
        _ => understand(body, "attach")?,
    };
    let wanted = if on_arrival { Request::AttachOnArrival(vm) } else { Request::Attach(vm) };
    act_on_vm(&context, wanted).await
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/detach",
    operation_id = "detach",
    description = "Unplug the topology channel.",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "It was done", body = Vm), Refusals),
)]
async fn detach(_: MayAct, State(context): State<Context>, VmName(vm): VmName) -> Answer<Vm> {
    act_on_vm(&context, Request::Detach(vm)).await
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/move",
    operation_id = "move_vcpu",
    description = "Confine a vCPU to the CPUs of a host node.",
    params(("name" = String, Path, description = "Name of the VM")),
    request_body = MoveRequest,
    responses((status = 200, description = "It was done", body = Vm), Refusals),
)]
async fn move_vcpu(
    _: MayAct,
    State(context): State<Context>,
    VmName(vm): VmName,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Vm> {
    let MoveRequest { vcpu, node } = understand(body, "move")?;
    act_on_vm(&context, Request::Move(vm, vcpu, node)).await
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/replug",
    operation_id = "replug",
    description = "Plug a vCPU again, on the guest node that is right for it.",
    params(("name" = String, Path, description = "Name of the VM")),
    request_body = ReplugRequest,
    responses((status = 200, description = "It was done", body = Replugged), Refusals),
)]
async fn replug(
    _: MayAct,
    State(context): State<Context>,
    VmName(vm): VmName,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Replugged> {
    let ReplugRequest { vcpu } = understand(body, "replug")?;
    match act(&context, Request::Replug(vm, vcpu)).await? {
        CoreAnswer::Replugged(replugged) => Ok(Json(*replugged)),
        _ => Err(Refusal::ShuttingDown.into()),
    }
}

#[utoipa::path(
    get,
    path = POLICIES,
    operation_id = "policies",
    description = "How the vCPUs of all VMs are scheduled.",
    responses((status = 200, description = "The answer", body = Vec<Scheduling>), Failures),
)]
async fn policies(State(context): State<Context>) -> Answer<Vec<Scheduling>> {
    let mut all = Vec::new();
    for name in ask(&context, ApiRequest::Names).await? {
        match ask(&context, |reply| ApiRequest::Scheduling(name, reply)).await? {
            Ok(scheduling) => all.push(scheduling),
            // The VM is gone meanwhile.
            Err(Refusal::NoVm(_) | Refusal::Ended { .. }) => {}
            Err(refusal) => return Err(refusal.into()),
        }
    }
    Ok(Json(all))
}

#[utoipa::path(
    get,
    path = "/v1/vms/{name}/policy",
    operation_id = "show_policy",
    description = "How the vCPUs of the VM are scheduled.",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "The answer", body = Scheduling), Failures),
)]
async fn show_policy(State(context): State<Context>, VmName(vm): VmName) -> Answer<Scheduling> {
    Ok(Json(ask(&context, |reply| ApiRequest::Scheduling(vm, reply)).await??))
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/policy",
    operation_id = "set_policy",
    description = "Give the VM another scheduling policy.",
    params(("name" = String, Path, description = "Name of the VM")),
    request_body = PolicyRequest,
    responses((status = 200, description = "It was done", body = Scheduling), Refusals),
)]
async fn set_policy(
    _: MayAct,
    State(context): State<Context>,
    VmName(vm): VmName,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Scheduling> {
    let PolicyRequest { policy } = understand(body, "policy")?;
    let policy = policy.parse().map_err(|error: UnknownPolicy| Failure::bad_request(error.to_string()))?;
    match act(&context, Request::SetPolicy(vm, policy)).await? {
        CoreAnswer::Scheduling(scheduling) => Ok(Json(*scheduling)),
        _ => Err(Refusal::ShuttingDown.into()),
    }
}

#[utoipa::path(
    get,
    path = "/v1/vms/{name}/memory",
    operation_id = "show_memory",
    description = "Where the memory of the VM is, looked at for the request unless that was done a moment ago.",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "The answer", body = VmMemory), Failures),
)]
async fn show_memory(State(context): State<Context>, VmName(vm): VmName) -> Answer<VmMemory> {
    act_on_memory(&context, Request::ShowMemory(vm)).await
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/memory",
    operation_id = "set_memory_policy",
    description = "Give the VM another memory policy.",
    params(("name" = String, Path, description = "Name of the VM")),
    request_body = MemoryPolicyRequest,
    responses((status = 200, description = "It was done", body = VmMemory), Refusals),
)]
async fn set_memory_policy(
    _: MayAct,
    State(context): State<Context>,
    VmName(vm): VmName,
    body: Result<Bytes, BytesRejection>,
) -> Answer<VmMemory> {
    let MemoryPolicyRequest { policy } = understand(body, "memory policy")?;
    let policy =
        policy.parse().map_err(|error: UnknownMemoryPolicy| Failure::bad_request(error.to_string()))?;
    act_on_memory(&context, Request::SetMemoryPolicy(vm, policy)).await
}

async fn act_on_memory(context: &Context, wanted: Request) -> Answer<VmMemory> {
    match act(context, wanted).await? {
        CoreAnswer::Memory(memory) => Ok(Json(*memory)),
        _ => Err(Refusal::ShuttingDown.into()),
    }
}

#[utoipa::path(
    get,
    path = "/v1/vms/{name}/rehome",
    operation_id = "show_rehome",
    description = "Where the guest nodes of the VM are, and how far the last re-home is.",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "The answer", body = Rehome), Failures),
)]
async fn show_rehome(State(context): State<Context>, VmName(vm): VmName) -> Answer<Rehome> {
    act_on_rehome(&context, Request::ShowRehome(vm)).await
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/rehome",
    operation_id = "rehome",
    description = "Give a guest node of the VM another home. It goes on after the answer.",
    params(("name" = String, Path, description = "Name of the VM")),
    request_body = RehomeRequest,
    responses((status = 200, description = "It has begun", body = Rehome), Refusals),
)]
async fn rehome(
    _: MayAct,
    State(context): State<Context>,
    VmName(vm): VmName,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Rehome> {
    let RehomeRequest { guest_node, node, dry_run, move_pinned } = understand(body, "re-home")?;
    let wish = RehomeWish { guest_node, node, dry_run, move_pinned, why: None };
    act_on_rehome(&context, Request::Rehome(vm, wish)).await
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/rehome/stop",
    operation_id = "stop_rehome",
    description = "End the re-home that is under way. What was moved stays where it is.",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "It was done", body = Rehome), Refusals),
)]
async fn stop_rehome(_: MayAct, State(context): State<Context>, VmName(vm): VmName) -> Answer<Rehome> {
    act_on_rehome(&context, Request::StopRehome(vm)).await
}

async fn act_on_rehome(context: &Context, wanted: Request) -> Answer<Rehome> {
    match act(context, wanted).await? {
        CoreAnswer::Rehome(rehome) => Ok(Json(*rehome)),
        _ => Err(Refusal::ShuttingDown.into()),
    }
}

#[utoipa::path(
    get,
    path = "/v1/vms/{name}/resize",
    operation_id = "show_sizes",
    description = "How large the guest nodes of the VM are and may be, and how far the last changes are.",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "The answer", body = Sizes), Failures),
)]
async fn show_sizes(State(context): State<Context>, VmName(vm): VmName) -> Answer<Sizes> {
    act_on_sizes(&context, Request::ShowSizes(vm)).await
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/resize",
    operation_id = "resize",
    description = "Give a guest node of the VM another size by its virtio-mem devices, or let vnumad size it. It goes on after the answer.",
    params(("name" = String, Path, description = "Name of the VM")),
    request_body = ResizeRequest,
    responses((status = 200, description = "It has begun", body = Sizes), Refusals),
)]
async fn resize(
    _: MayAct,
    State(context): State<Context>,
    VmName(vm): VmName,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Sizes> {
    let ResizeRequest { guest_node, size_bytes, auto, dry_run } = understand(body, "size of a guest node")?;
    let size = match (size_bytes, auto) {
        (Some(bytes), None) => WantedSize::Fixed(bytes),
        (None, Some(auto)) => WantedSize::Auto(auto.least_bytes, auto.most_bytes),
        _ => return Err(Failure::bad_request("expected either size_bytes or auto".to_owned())),
    };
    let wish = ResizeWish { guest_node, size, dry_run };
    act_on_sizes(&context, Request::Resize(vm, wish)).await
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/resize/stop",
    operation_id = "stop_resize",
    description = "End the changes of guest nodes that are under way. They keep the sizes that they have by then.",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "It was done", body = Sizes), Refusals),
)]
async fn stop_resize(_: MayAct, State(context): State<Context>, VmName(vm): VmName) -> Answer<Sizes> {
    act_on_sizes(&context, Request::StopResize(vm)).await
}

async fn act_on_sizes(context: &Context, wanted: Request) -> Answer<Sizes> {
    match act(context, wanted).await? {
        CoreAnswer::Sizes(sizes) => Ok(Json(*sizes)),
        _ => Err(Refusal::ShuttingDown.into()),
    }
}

#[utoipa::path(
    get,
    path = "/v1/vms/{name}/migrate",
    operation_id = "show_migration",
    description = "How far the last migration of the VM is, also when the VM is gone.",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "The answer", body = Migration), Failures),
)]
async fn show_migration(State(context): State<Context>, VmName(vm): VmName) -> Answer<Migration> {
    act_on_migration(&context, Request::ShowMigration(vm)).await
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/migrate",
    operation_id = "migrate",
    description = "Detach the VM and migrate it to another host. It goes on after the answer. If it fails, the VM is attached again.",
    params(("name" = String, Path, description = "Name of the VM")),
    request_body = MigrateRequest,
    responses((status = 200, description = "It has begun", body = Migration), Refusals),
)]
async fn migrate(
    _: MaySend,
    State(context): State<Context>,
    VmName(vm): VmName,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Migration> {
    let MigrateRequest { destination, post_copy } = understand(body, "migration")?;
    act_on_migration(&context, Request::Migrate(vm, destination, post_copy)).await
}

#[utoipa::path(
    post,
    path = "/v1/vms/{name}/migrate/cancel",
    operation_id = "cancel_migration",
    description = "End the migration that is under way. The VM is attached again, after the answer.",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "It is being cancelled", body = Migration), Refusals),
)]
async fn cancel_migration(
    _: MayAct,
    State(context): State<Context>,
    VmName(vm): VmName,
) -> Answer<Migration> {
    act_on_migration(&context, Request::CancelMigration(vm)).await
}

async fn act_on_migration(context: &Context, wanted: Request) -> Answer<Migration> {
    match act(context, wanted).await? {
        CoreAnswer::Migration(migration) => Ok(Json(*migration)),
        _ => Err(Refusal::ShuttingDown.into()),
    }
}

/// What has to do with reservations: it knows which VMs there are, and may wait for files.
async fn with_placements<T: Send + 'static>(
    context: &Context,
    run: impl FnOnce(&Placements, &[VmUse], u64) -> Result<T, PlacementError> + Send + 'static,
) -> Answer<T> {
    let uses = ask(context, ApiRequest::Uses).await?;
    let placements = Arc::clone(&context.placements);
    let done = tokio::task::spawn_blocking(move || run(&placements, &uses, monotonic_ns())).await;
    Ok(Json(done.map_err(|_| Refusal::ShuttingDown)??))
}

#[utoipa::path(
    post,
    path = PLACEMENTS,
    operation_id = "place",
    description = "Decide where a VM goes that is to be started, and reserve that.",
    request_body = PlaceRequest,
    responses((status = 200, description = "It was done", body = Placed), Refusals),
)]
async fn place(
    _: MayAct,
    State(context): State<Context>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Placed> {
    let wanted: PlaceRequest = understand(body, "placement")?;
    with_placements(&context, move |placements, uses, now_ns| placements.place(uses, &wanted, now_ns)).await
}

#[utoipa::path(
    get,
    path = PLACEMENTS,
    operation_id = "placements",
    description = "Reservations of VMs.",
    responses((status = 200, description = "The answer", body = Vec<Reserved>), Failures),
)]
async fn placements(State(context): State<Context>) -> Answer<Vec<Reserved>> {
    with_placements(&context, |placements, uses, now_ns| placements.list(uses, now_ns)).await
}

#[utoipa::path(
    get,
    path = DEVICES,
    operation_id = "devices",
    description = "PCI functions and who has them.",
    responses((status = 200, description = "The answer", body = Devices), Failures),
)]
async fn devices(State(context): State<Context>) -> Answer<Devices> {
    with_placements(&context, |placements, uses, now_ns| placements.devices(uses, now_ns)).await
}

#[utoipa::path(
    get,
    path = CAPACITY,
    operation_id = "capacity",
    description = "What is free on each node for VMs that are to be started.",
    responses((status = 200, description = "The answer", body = Vec<NodeFree>), Failures),
)]
async fn capacity(State(context): State<Context>) -> Answer<Vec<NodeFree>> {
    with_placements(&context, |placements, uses, now_ns| placements.capacity(uses, now_ns)).await
}

#[utoipa::path(
    post,
    path = "/v1/placements/{name}/release",
    operation_id = "release",
    description = "Give up the reservation of a VM that is not there.",
    params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "It was done", body = Reserved), Refusals),
)]
async fn release(_: MayAct, State(context): State<Context>, VmName(vm): VmName) -> Answer<Reserved> {
    with_placements(&context, move |placements, uses, now_ns| placements.release(uses, &vm, now_ns)).await
}

fn understand<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>, what: &str) -> Result<T, Failure> {
    let body =
        body.map_err(|_| Failure::bad_request(format!("the body is longer than {BODY_LIMIT} bytes")))?;
    serde_json::from_slice(&body)
        .map_err(|error| Failure::bad_request(format!("the body is no {what} request: {error}")))
}

async fn unknown(request: axum::extract::Request) -> Failure {
    let message = format!("no such path: {}", request.uri().path());
    Failure(ApiError { error: ErrorKind::NotFound, message })
}

async fn wrong_method(request: axum::extract::Request) -> Failure {
    Failure::bad_request(format!("{} is not possible on {}", request.method(), request.uri().path()))
}
