//! A handler that panics answers 500, and nothing else comes of it: its connection, and all others, go on.

use super::context::Failure;
use axum::{
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::{
    any::Any,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::{Context, Poll},
};
use tracing::error;
use vnuma_api::ErrorKind;
use vnuma_process::panic_message;

/// A future whose panic is an error.
struct Caught<F>(Pin<Box<F>>);

impl<F: Future> Future for Caught<F> {
    type Output = Result<F::Output, Box<dyn Any + Send>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // After a panic it is not polled again.
        match catch_unwind(AssertUnwindSafe(|| self.0.as_mut().poll(context))) {
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Ok(Poll::Pending) => Poll::Pending,
            Err(panic) => Poll::Ready(Err(panic)),
        }
    }
}

/// A layer around all handlers.
pub(super) async fn caught(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    match Caught(Box::pin(next.run(request))).await {
        Ok(response) => response,
        Err(panic) => {
            error!(path, why = panic_message(&*panic), "a handler of the API panicked");
            let why = "vnumad's handler of this request panicked; its log has why".to_owned();
            Failure::new(ErrorKind::Internal, why).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::{Router, middleware::from_fn, routing::get};
    use std::{
        io::{Read, Write},
        os::unix::net::UnixStream,
    };

    #[test]
    fn a_handler_that_panics_answers_500_and_its_connection_goes_on() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("api.sock");
        let bound = runtime.block_on(async { tokio::net::UnixListener::bind(&path) }).expect("bound");
        let panics = get(async || -> String {
            tokio::task::yield_now().await;
            panic!("a test wants it so")
        });
        let router = Router::new()
            .route("/panics", panics)
            .route("/works", get(async || "it works"))
            .layer(from_fn(caught));
        runtime.spawn(async move { axum::serve(bound, router).await });
        let mut stream = UnixStream::connect(&path).expect("connected");
        stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).expect("a limit");
        let mut ask = |path: &str, end: &str| {
            write!(stream, "GET {path} HTTP/1.1\r\nHost: vnuma\r\n\r\n").expect("sent");
            let mut answer = String::new();
            while !answer.ends_with(end) {
                let mut bytes = [0; 1024];
                let length = stream.read(&mut bytes).expect("an answer");
                assert!(length > 0, "the connection was closed after {answer:?}");
                answer.push_str(std::str::from_utf8(&bytes[..length]).expect("UTF-8"));
            }
            answer
        };
        for _ in 0..2 {
            assert!(ask("/panics", "}").starts_with("HTTP/1.1 500 "));
            assert!(ask("/works", "it works").starts_with("HTTP/1.1 200 "));
        }
    }
}
