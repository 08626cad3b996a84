//! Answers the dashboard's HTTP requests.

use std::convert::Infallible;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures_core::Stream;
use millrace_cost::merge;
use millrace_cost::report::{Report, Stacks};
use millrace_daemon::http;
use serde::Serialize;
use tokio::sync::mpsc;

use super::{DashboardShared, assets, metrics};

/// Longest time that a request for a sum of reports waits while the sums of other requests are computed.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Content security policy that allows only this server's own files, and forbids framing.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                                       connect-src 'self'; base-uri 'none'; form-action 'none'; \
                                       frame-ancestors 'none'";

pub(super) fn router(shared: Arc<DashboardShared>) -> Router {
    Router::new()
        .route("/", get(assets::PAGE))
        .route("/app.js", get(assets::SCRIPT))
        .route("/app.css", get(assets::STYLE))
        .route("/icon.svg", get(assets::ICON))
        .route("/api/reports", get(reports))
        .route("/api/report", get(report))
        .route("/api/stacks", get(stacks))
        .route("/api/history", get(history))
        .route("/metrics", get(scrape))
        .layer(middleware::map_response(secure))
        .with_state(shared)
}

async fn secure(mut response: Response) -> Response {
    let headers = [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Sends server-sent events: `hello`, then a `report` for each new report. The event `dropped` has the number of
/// reports that were not sent because the viewer reads too slowly.
async fn reports(State(shared): State<Arc<DashboardShared>>) -> Response {
    match shared.watch() {
        Ok(frames) => {
            let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
            (headers, Body::from_stream(ReportFrames(frames))).into_response()
        }
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
    }
}

struct ReportFrames(mpsc::Receiver<Bytes>);

impl Stream for ReportFrames {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|frame| frame.map(Ok))
    }
}

/// Returns the latest report, or the sum of the reports in a range of time, without stacks.
async fn report(State(shared): State<Arc<DashboardShared>>, RawQuery(query): RawQuery) -> Response {
    let wanted = match ReportQuery::parse(query.as_deref()) {
        Ok(wanted) => wanted,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    };
    let summed = aside(shared, MAX_WAIT, move |shared| {
        let reports = shared.select_reports(&wanted);
        merge::merge_tables(reports.iter().map(|report| &**report))
    });
    answer(summed.await)
}

/// Returns the stacks of the latest report or of a range of time, of all CPUs or of one.
async fn stacks(State(shared): State<Arc<DashboardShared>>, RawQuery(query): RawQuery) -> Response {
    let wanted = match ReportQuery::parse(query.as_deref()) {
        Ok(wanted) => wanted,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    };
    answer(
        aside(shared, MAX_WAIT, move |shared| {
            Sampled::from_reports(&shared.select_reports(&wanted), wanted.cpu)
        })
        .await,
    )
}

async fn history(State(shared): State<Arc<DashboardShared>>) -> Response {
    Json(shared.state.lock().history.points()).into_response()
}

async fn scrape(State(shared): State<Arc<DashboardShared>>) -> Response {
    http::metrics(metrics::encode(&shared))
}

/// The reason why no sum of reports was computed for a request.
enum Unsummed {
    Nothing,
    Busy,
}

/// Computes a sum of reports in another thread, so that viewers are served meanwhile. A range of time may cover every
/// stored report, so few sums are computed at once. A sum whose client has disconnected still counts toward that limit
/// until it is computed.
async fn aside<T: Send + 'static>(
    shared: Arc<DashboardShared>,
    wait: Duration,
    sum: impl FnOnce(&DashboardShared) -> Option<T> + Send + 'static,
) -> Result<T, Unsummed> {
    let turn = tokio::time::timeout(wait, Arc::clone(&shared.sums).acquire_owned()).await;
    let Ok(Ok(turn)) = turn else { return Err(Unsummed::Busy) };
    let done = tokio::task::spawn_blocking(move || {
        let done = sum(&shared);
        // `turn` counts toward the limit of sums that are computed at once. This thread drops it, not the HTTP request:
        // the client may have cancelled the request long before.
        drop(turn);
        done
    });
    done.await.ok().flatten().ok_or(Unsummed::Nothing)
}

fn answer(value: Result<impl Serialize, Unsummed>) -> Response {
    match value {
        Ok(value) => Json(value).into_response(),
        Err(Unsummed::Nothing) => {
            (StatusCode::NOT_FOUND, "there are no reports of this time range\n").into_response()
        }
        Err(Unsummed::Busy) => {
            let headers = [(header::RETRY_AFTER, "5")];
            (StatusCode::SERVICE_UNAVAILABLE, headers, "too many sums at once: try again\n").into_response()
        }
    }
}

#[derive(Serialize)]
struct Sampled {
    time_unix_ms: u64,
    period_ns: u64,
    /// Number of samples per second on each CPU; 0 if no stacks are sampled.
    frequency_hz: u32,
    #[serde(flatten)]
    stacks: Stacks,
}

impl Sampled {
    fn from_reports(reports: &[Arc<Report>], cpu: Option<u32>) -> Option<Self> {
        let last = reports.last()?;
        let all = merge::stacks(reports.iter().filter_map(|report| report.stacks.as_ref()), |of| {
            cpu.is_none_or(|cpu| cpu == of)
        });
        Some(Self {
            time_unix_ms: last.time_unix_ms,
            period_ns: reports.iter().map(|report| report.period_ns).sum(),
            frequency_hz: last.frequency_hz,
            stacks: all,
        })
    }
}

/// The parameters of an HTTP request. Its response covers the reports whose periods end between the times `from` and
/// `to`, which are milliseconds since 1970. Without `from` and `to`, it covers only the latest report.
#[derive(Debug, Default, PartialEq, Eq)]
struct ReportQuery {
    range: Option<RangeInclusive<u64>>,
    cpu: Option<u32>,
}

impl ReportQuery {
    fn parse(query: Option<&str>) -> Result<Self, String> {
        let mut from = None;
        let mut to = None;
        let mut cpu = None;
        for (key, value) in url::form_urlencoded::parse(query.unwrap_or_default().as_bytes()) {
            let number = value.parse::<u64>().map_err(|_| format!("{key}: {value:?} is not a number"))?;
            match &*key {
                "from" => from = Some(number),
                "to" => to = Some(number),
                "cpu" => cpu = Some(u32::try_from(number).map_err(|_| format!("there is no CPU {number}"))?),
                _ => return Err(format!("{key} is no parameter: use from, to or cpu")),
            }
        }
        let range = (from.is_some() || to.is_some()).then(|| from.unwrap_or(0)..=to.unwrap_or(u64::MAX));
        Ok(Self { range, cpu })
    }
}

impl DashboardShared {
    /// Returns the reports of a request. Only references are copied while the lock is held, since new reports wait for
    /// it.
    fn select_reports(&self, wanted: &ReportQuery) -> Vec<Arc<Report>> {
        let state = self.state.lock();
        match &wanted.range {
            Some(range) => state.history.range(range),
            None => state.history.latest().into_iter().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn report_sum_request_over_the_concurrency_limit_is_refused_as_busy() {
        let access = http::access::HttpAccess::default();
        let losses = Arc::default();
        let addr = ([127, 0, 0, 1], 0).into();
        let config = super::super::Config { addr, memory_bytes: 0, live: true, access, losses };
        let shared = Arc::new(DashboardShared::new(&config));
        assert!(aside(Arc::clone(&shared), MAX_WAIT, |_| Some(())).await.is_ok());
        assert!(matches!(aside(Arc::clone(&shared), MAX_WAIT, |_| None::<()>).await, Err(Unsummed::Nothing)));
        let turns = u32::try_from(shared.sums.available_permits()).unwrap();
        let others = shared.sums.acquire_many(turns).await.unwrap();
        assert!(matches!(
            aside(Arc::clone(&shared), Duration::ZERO, |_| Some(())).await,
            Err(Unsummed::Busy)
        ));
        drop(others);
        assert!(aside(Arc::clone(&shared), MAX_WAIT, |_| Some(())).await.is_ok());
    }

    #[test]
    fn api_queries_are_parsed_or_refused() {
        let wanted = |query| ReportQuery::parse(Some(query));
        assert_eq!(ReportQuery::parse(None), Ok(ReportQuery::default()));
        assert_eq!(wanted("from=5&to=7&cpu=3"), Ok(ReportQuery { range: Some(5..=7), cpu: Some(3) }));
        assert_eq!(wanted("from=5"), Ok(ReportQuery { range: Some(5..=u64::MAX), cpu: None }));
        for wrong in ["from=x", "till=3", "cpu=99999999999", "from=-1"] {
            assert!(wanted(wrong).is_err(), "{wrong}");
        }
    }
}
