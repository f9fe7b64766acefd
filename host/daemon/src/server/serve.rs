//! A row of the API's table: an operation and its handler become a route, which checks the right first, and a description.

use super::{
    context::{Asker, BODY_LIMIT, Client, Context, Failure},
    openapi::{Failures, Refusals},
};
use crate::fair::Lane;
use axum::{
    body::Bytes,
    extract::{ConnectInfo, FromRequest, FromRequestParts, Path, Request, State},
    http::header::CONTENT_TYPE,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::{Serialize, de::DeserializeOwned};
use utoipa::{
    IntoResponses, PartialSchema, ToSchema,
    openapi::{
        ArrayBuilder, Content, HttpMethod, ObjectBuilder, OneOfBuilder, Paths, PathsBuilder, Ref, RefOr,
        Required, ResponseBuilder, ResponsesBuilder, Schema, Type,
        path::{OperationBuilder, ParameterBuilder, ParameterIn, PathItem},
        request_body::{RequestBody, RequestBodyBuilder},
    },
};
use utoipa_axum::router::UtoipaMethodRouter;
use vnuma_api::{
    AttachRequest, MemoryPolicyRequest, MigrateRequest, MoveRequest, PlaceRequest, PolicyRequest,
    RehomeRequest, ReplugRequest, ResizeRequest,
    operation::{Operation, Right, Subject},
};

/// Schemas by their names.
type Schemas = Vec<(String, RefOr<Schema>)>;

/// What an operation is about: `()`, or the name of a VM.
type Named<O> = <<O as Operation>::Subject<'static> as Subject>::Owned;

/// The body of a request.
pub(super) trait Input: Sized + Send + 'static {
    /// What it is called in errors. `None`: there is none, and whatever comes is left unread.
    const WHAT: Option<&'static str>;

    fn read(body: &[u8]) -> serde_json::Result<Self>;

    fn describe(schemas: &mut Schemas) -> Option<RequestBody>;
}

/// A body that is JSON.
trait Body: DeserializeOwned + ToSchema + Send + 'static {
    const WHAT: &'static str;
}

macro_rules! bodies {
    ($($body:ty: $what:literal,)+) => {
        $(impl Body for $body {
            const WHAT: &'static str = $what;
        })+
    };
}

bodies! {
    AttachRequest: "attach",
    MoveRequest: "move",
    ReplugRequest: "replug",
    PolicyRequest: "policy",
    MemoryPolicyRequest: "memory policy",
    RehomeRequest: "re-home",
    ResizeRequest: "size of a guest node",
    MigrateRequest: "migration",
    PlaceRequest: "placement",
}

impl Input for () {
    const WHAT: Option<&'static str> = None;

    fn read(_body: &[u8]) -> serde_json::Result<Self> {
        Ok(())
    }

    fn describe(_schemas: &mut Schemas) -> Option<RequestBody> {
        None
    }
}

impl<T: Body> Input for T {
    const WHAT: Option<&'static str> = Some(T::WHAT);

    fn read(body: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(body)
    }

    fn describe(schemas: &mut Schemas) -> Option<RequestBody> {
        let content = Content::new(Some(reference::<T>(schemas)));
        let body = RequestBodyBuilder::new().content("application/json", content);
        Some(body.required(Some(Required::True)).build())
    }
}

/// One that may be missing.
impl<T: Body> Input for Option<T> {
    const WHAT: Option<&'static str> = Some(T::WHAT);

    fn read(body: &[u8]) -> serde_json::Result<Self> {
        if body.is_empty() { Ok(None) } else { T::read(body).map(Some) }
    }

    fn describe(schemas: &mut Schemas) -> Option<RequestBody> {
        let nothing = ObjectBuilder::new().schema_type(Type::Null);
        let either = OneOfBuilder::new().item(nothing).item(reference::<T>(schemas)).build();
        let content = Content::new(Some(Schema::OneOf(either)));
        Some(RequestBodyBuilder::new().content("application/json", content).build())
    }
}

/// The route of an operation, and its description.
pub(super) fn serve<O, F, A>(handle: F) -> UtoipaMethodRouter<Context>
where
    O: Operation + 'static,
    O::Input: Input,
    F: Fn(Asker, Named<O>, O::Input) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Result<O::Output, Failure>> + Send + 'static,
{
    let handler = async move |State(context): State<Context>, request: Request| {
        let (client, subject, input) = understand::<O>(&context, request).await?;
        let asker = Asker::new(context, client);
        let lane = if O::MANY { Some(asker.list().await) } else { None };
        answer(&handle(asker, subject, input).await?, lane)
    };
    let (http, method) = match O::RIGHT {
        Right::Read => (HttpMethod::Get, get(handler)),
        Right::Act(_) | Right::Send(_) => (HttpMethod::Post, post(handler)),
    };
    let mut schemas = Schemas::new();
    let paths = describe::<O>(http, &mut schemas);
    (schemas, paths, method)
}

/// A body, with what is held until the client has taken it.
struct Answer {
    text: Vec<u8>,
    _lane: Option<Lane>,
}

impl AsRef<[u8]> for Answer {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

fn answer(of: &impl Serialize, lane: Option<Lane>) -> Result<Response, Failure> {
    let text = serde_json::to_vec(of).map_err(|error| Failure::internal(error.to_string()))?;
    let body = Bytes::from_owner(Answer { text, _lane: lane });
    Ok(([(CONTENT_TYPE, "application/json")], body).into_response())
}

fn is_named<O: Operation>() -> bool {
    O::PATH.contains("{name}")
}

/// Whether the peer may ask for it; then what it is about, and the body.
async fn understand<O: Operation>(
    context: &Context,
    request: Request,
) -> Result<(Client, Named<O>, O::Input), Failure>
where
    O::Input: Input,
{
    let (mut parts, body) = request.into_parts();
    let client = ConnectInfo::<Client>::from_request_parts(&mut parts, context).await;
    let ConnectInfo(client) =
        client.map_err(|_| Failure::bad_request("it is not known who asks".to_owned()))?;
    client.peer.check(O::RIGHT, context.act_group.as_deref())?;
    let name = match is_named::<O>() {
        false => String::new(),
        true => match Path::<String>::from_request_parts(&mut parts, context).await {
            Ok(Path(name)) => name,
            Err(_) => {
                let path = parts.uri.path();
                return Err(Failure::bad_request(format!("{path}: the name of the VM is not UTF-8")));
            }
        },
    };
    let subject = <O::Subject<'static> as Subject>::owned(name);
    let Some(what) = O::Input::WHAT else {
        let nothing = O::Input::read(&[]).map_err(|error| Failure::bad_request(error.to_string()))?;
        return Ok((client, subject, nothing));
    };
    let body = Bytes::from_request(Request::from_parts(parts, body), context).await;
    let body =
        body.map_err(|_| Failure::bad_request(format!("the body is longer than {BODY_LIMIT} bytes")))?;
    let input = O::Input::read(&body)
        .map_err(|error| Failure::bad_request(format!("the body is no {what} request: {error}")))?;
    Ok((client, subject, input))
}

/// Refers to a schema, which is described once.
fn reference<T: ToSchema>(schemas: &mut Schemas) -> RefOr<Schema> {
    T::schemas(schemas);
    schemas.push((T::name().into_owned(), T::schema()));
    Ref::from_schema_name(T::name()).into()
}

fn describe<O: Operation>(method: HttpMethod, schemas: &mut Schemas) -> Paths
where
    O::Input: Input,
{
    let item = reference::<O::Item>(schemas);
    let answer = if O::MANY { ArrayBuilder::new().items(item).into() } else { item };
    let done =
        ResponseBuilder::new().description(O::DONE).content("application/json", Content::new(Some(answer)));
    let failures = match O::RIGHT {
        Right::Read => Failures::responses(),
        Right::Act(_) | Right::Send(_) => {
            Failures::responses().into_iter().chain(Refusals::responses()).collect()
        }
    };
    let responses = ResponsesBuilder::new().response("200", done).responses_from_iter(failures);
    let mut operation = OperationBuilder::new()
        .operation_id(Some(O::NAME))
        .description(Some(O::DESCRIPTION))
        .request_body(O::Input::describe(schemas))
        .responses(responses);
    if is_named::<O>() {
        let name = ParameterBuilder::new()
            .name("name")
            .parameter_in(ParameterIn::Path)
            .description(Some("Name of the VM"))
            .required(Required::True)
            .schema(Some(String::schema()));
        operation = operation.parameter(name);
    }
    PathsBuilder::new().path(O::PATH, PathItem::new(method, operation)).build()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fair::{Lanes, ROOT};
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };

    #[test]
    fn a_list_has_its_lane_until_it_is_taken() {
        let lanes = Lanes::new(1);
        let mut context = Context::from_waker(Waker::noop());
        let mut enter = || pin!(lanes.enter(ROOT)).poll(&mut context);
        let Poll::Ready(lane) = enter() else { panic!("it is free") };
        let response = answer(&[1], Some(lane)).map_err(|_| "JSON").expect("an answer");
        assert!(enter().is_pending());
        drop(response);
        assert!(enter().is_ready());
    }
}
