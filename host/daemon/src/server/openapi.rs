//! The description of the API as OpenAPI 3.1 has it, made of the handlers and the types that are served.

use super::api::routes;
use axum::{
    http::header::CONTENT_TYPE,
    response::{IntoResponse, Response},
};
use std::sync::LazyLock;
use utoipa::{
    IntoResponses,
    openapi::{Info, License, OpenApi, RefOr, Schema, Server},
};
use vnuma_api::{ApiError, OPENAPI};

/// How a request that reads can fail.
#[derive(IntoResponses)]
#[allow(dead_code, reason = "a description, of which there are no values")]
pub(super) enum Failures {
    /// The request makes no sense.
    #[response(status = 400)]
    BadRequest(ApiError),
    /// There is no such VM, vCPU or node.
    #[response(status = 404)]
    NotFound(ApiError),
    /// The VM is not in a state for this.
    #[response(status = 409)]
    Conflict(ApiError),
    /// Something in vnumad or the system failed.
    #[response(status = 500)]
    Internal(ApiError),
    /// The VM's hypervisor does not answer, or refuses.
    #[response(status = 502)]
    Vm(ApiError),
    /// The user has as many connections, watchers or requests as one may have.
    #[response(status = 503)]
    Busy(ApiError),
}

/// How a request that acts fails otherwise than one that reads.
#[derive(IntoResponses)]
#[allow(dead_code, reason = "a description, of which there are no values")]
pub(super) enum Refusals {
    /// The right to act is missing.
    #[response(status = 403)]
    Forbidden(ApiError),
    /// The user has as many connections or requests as one may have.
    #[response(status = 503)]
    Busy(ApiError),
}

/// What the routes do not bring with them: types that only failures have.
#[derive(utoipa::OpenApi)]
#[openapi(components(schemas(ApiError)))]
pub(super) struct Base;

static DOCUMENT: LazyLock<String> = LazyLock::new(|| {
    let (_, mut api): (_, OpenApi) = routes().split_for_parts();
    api.info = Info::new("vnumad", "1");
    api.info.description = Some(
        "The interface of vnumad, by HTTP/1.1 over the Unix socket /run/vnuma/vnumad.sock. Within /v1 fields, kinds of \
         events and paths may be added; ignore what you do not know. Anything else takes another version in the path."
            .to_owned(),
    );
    let mut licence = License::new("Apache-2.0");
    licence.identifier = Some("Apache-2.0".to_owned());
    api.info.license = Some(licence);
    api.servers = Some(vec![Server::new("http://vnumad")]);
    let schemas = api.components.iter_mut().flat_map(|components| components.schemas.values_mut());
    schemas.for_each(without_defaults);
    // Only a value whose keys are no text cannot be written, and there is none.
    api.to_pretty_json().unwrap_or_default() + "\n"
});

/// Takes the defaults of structures away: JSON of them is more than generators of clients understand.
fn without_defaults(schema: &mut RefOr<Schema>) {
    let RefOr::T(schema) = schema else { return };
    match schema {
        Schema::Object(object) => object.properties.values_mut().for_each(without_defaults),
        Schema::OneOf(one_of) => {
            one_of.default.take_if(|default| default.is_object());
            one_of.items.iter_mut().for_each(without_defaults);
        }
        Schema::AllOf(all_of) => all_of.items.iter_mut().for_each(without_defaults),
        _ => {}
    }
}

/// The description, as JSON.
pub fn document() -> &'static str {
    &DOCUMENT
}

#[utoipa::path(
    get,
    path = OPENAPI,
    operation_id = "openapi",
    description = "This description.",
    responses((status = 200, description = "OpenAPI 3.1", body = serde_json::Value)),
)]
pub(super) async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], document()).into_response()
}
