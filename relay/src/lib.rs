//! A relay for Media over QUIC Transport (drafts 18 to 22 of MoQ Transport), as a library.
//!
//! A relay takes objects from publishers, keeps the recent ones in a cache, and sends them to subscribers. It speaks
//! MoQ Transport on both sides; a peer may be publisher, subscriber or another relay, all in one session.
//!
//! # What it is made of
//!
//! | module | what it is |
//! | --- | --- |
//! | `server` | endpoints, the sessions that are open, start and end: [`BoundRelay`], [`Server`] |
//! | `report`, [`status`] | what the relay says about itself |
//! | [`trace`] | what happens to single packets, for those who watch |
//! | `session` | one MoQ session: its context, and one module for each family of requests |
//! | `hub` | what sessions share: tracks by name, published namespaces, those who watch them |
//! | `live` | a track: its publishers, its objects in the cache, its subscriptions |
//! | `subscription` | which subgroups are sent to one subscriber, and on which streams |
//! | `ladders` | which renditions stand for each other: [`AdaptiveMode`] |
//! | `delays` | how long media may wait for a subscriber: [`Delays`] |
//! | `upstream` | one publisher of a track |
//! | `millrace-relay-cluster` | the routes between relays: `hub::routes` keeps them, `session::mesh` sends and receives them |
//! | `directory` | the store in which relays look up namespaces, instead of announcing them: [`NamespaceDirectory`]; `server::on_demand` connects |
//! | [`LogLimit`] | how many log lines peers may cause: a layer for the log subscriber of a program that embeds a relay |
//! | `wire` | control messages on QUIC streams, and the reason why a session ends |
//! | [`access`] | decisions about requests: rules, tokens, certificates, budgets |
//! | `engine`, `config`, `admission` | what a relay is started with: [`RelayEngine`], [`Config`], [`Admission`] |
//!
//! Below this crate, `millrace-transport` has the QUIC connections and sends the packets, and `millrace-quic` and
//! `millrace-moq` have the messages, the cache and the decisions that need neither sockets nor a clock.
//!
//! # The life of an object
//!
//! 1. A publisher announces a namespace or a track. `session::namespaces` or `session::publish` registers it with the
//!    `hub`.
//! 2. A subscriber sends SUBSCRIBE for a track. `session::subscribe` has the `hub` find the track, which subscribes at
//!    its publishers if nobody has yet. The hub asks them through the trait `hub::HubPublisher`, and does not depend on
//!    sessions.
//! 3. The object arrives on a stream. `session::streams` looks up the track alias, reads the stream piece by piece
//!    into the cache, and tells the `live` track of each piece. Nothing waits for an object to be complete.
//! 4. The track offers the piece to each `subscription`. That opens a stream on its own connection, or continues one;
//!    the stream reads from the cache, so that there is one copy for all subscribers.
//! 5. An `Outbox` collects the packets that connections may send now, and sends one batch for each socket. If many
//!    connections of several shards have something to send, the threads of the shards do so at the same time.
//! 6. The object is in the cache until it is too old or room is needed. Until then FETCH (`session::fetch`) and
//!    later subscribers get it from there.
//!
//! With engine `kernel`, streams of step 4 are delegated to the kernel, which sends most packets on its own. Userspace
//! still sees every object, and sends what the kernel could not.
//!
//! # Dependencies
//!
//! ```text
//! server -> report -> session -> hub -> live -> subscription
//!        -> trace  -> hub        |       |---> upstream
//!                                `-> wire
//! ```
//!
//! Modules depend only on modules to their right. Within `session`, each family of requests depends on the context, and
//! few depend on another family. Only `requests` and the session itself know all families.
//!
//! All that a session starts ends with the session. Its tasks are in one task set, and its registrations with the hub
//! and with tracks are removed when their guards are dropped.
//!
//! # Example
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//!
//! use millrace_moq::{Draft, tracks::cache};
//! use millrace_relay::{AdaptiveMode, BoundRelay, Config, Delays, RelayEngine, OpenAdmission, Origins};
//!
//! # fn certificate() -> rustls::sign::CertifiedKey {
//! #     let generated = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
//! #     let key = generated.signing_key.serialize_der().try_into().unwrap();
//! #     let key = rustls::crypto::ring::sign::any_supported_type(&key).unwrap();
//! #     rustls::sign::CertifiedKey::new(vec![generated.cert.der().clone()], key)
//! # }
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let certificate = Some(Arc::new(certificate()));
//!     let transport = millrace_transport::Config { certificate, ..Default::default() };
//!     let config = Config {
//!         listen: vec!["127.0.0.1:0".parse()?],
//!         upstreams: Vec::new(),
//!         cluster: None,
//!         transport,
//!         cache: cache::CacheLimits { bytes: 64 << 20, age: Duration::from_secs(30) },
//!         max_sessions: 1000,
//!         max_tracks: 1000,
//!         offloaded_tracks: 128,
//!         linger: Duration::from_secs(5),
//!         drain_timeout: Duration::from_secs(5),
//!         goaway_uri: None,
//!         delays: Delays { default: Some(Duration::from_millis(250)), ..Delays::default() },
//!         origins: Origins::Any,
//!         adaptive: AdaptiveMode::Off,
//!         switching_sets: false,
//!         drafts: Draft::ALL.to_vec(),
//!     };
//!     let engine = Arc::new(RelayEngine::user("as configured"));
//!     let relay = BoundRelay::new(config, Vec::new(), engine)?.serve(Arc::new(OpenAdmission));
//!     println!("moqt://{} is served by engine {}", relay.local_addrs()[0], relay.status().engine.name);
//!     relay.drain().await;
//!     Ok(())
//! }
//! ```
#![deny(missing_docs)]

mod admission;
mod config;
mod delays;
mod directory;
mod engine;
mod hub;
mod ladders;
mod live;
mod report;
mod server;
mod session;
mod subscription;
pub mod trace;
mod upstream;
mod wire;

pub use millrace_access as access;

pub use admission::{Admission, OpenAdmission, Permit, TooManySessions};
pub use config::{ClusterPeer, Config, Origins, RelayCluster, UpstreamRelay, has_user, is_of_a_relay};
pub use delays::{DelayRule, Delays};
pub use directory::{LookedUpPeers, NamespaceDirectory};
pub use engine::RelayEngine;
pub use ladders::{AdaptiveMode, LadderRule};
pub use millrace_logging::LogLimit;
pub use millrace_relay_status as status;
pub use server::takeover::{InheritedSockets, LINK_NAME, LinkCertificate};
pub use server::{BoundRelay, Server, outgoing_sockets};
