//! A relay for Media over QUIC Transport (drafts 18 to 22 of MoQ Transport), as a library.
//!
//! A relay takes objects from publishers, keeps the recent ones in a cache, and sends them to subscribers. It speaks
//! MoQ Transport on both sides; a peer may be publisher, subscriber or another relay, all in one session.
//!
//! # What it is made of
//!
//! | module | what it is |
//! | --- | --- |
//! | `server` | endpoints, the sessions that are open, start and end: [`Bound`], [`Server`] |
//! | `report`, [`status`] | what the relay says about itself |
//! | [`trace`] | what happens to single packets, for those who watch |
//! | `session` | one MoQ session: a context, and a module for each family of requests |
//! | `hub` | what sessions share: tracks by name, published namespaces, those who watch them |
//! | `live` | a track: its publishers, its objects in the cache, its subscriptions |
//! | `subscription` | which subgroups one subscriber gets, as which streams |
//! | `ladders`, `catalog` | which renditions stand for each other: [`Adaptive`]; catalogs as they were read |
//! | `delays` | how long media may wait for a subscriber: [`Delays`] |
//! | `upstream`, `reconnect` | one publisher's part in a track; how long the relay waits before it calls its upstream relay again |
//! | `outbox` | packets of several connections that leave in one batch |
//! | `incomplete` | how much a session may send of what is not complete |
//! | [`LogLimit`] | how many log lines peers may cause: a layer for the log subscriber of a program that embeds a relay |
//! | `waiters` | who waits for what, and is woken by nothing else |
//! | `wire` | control messages on QUIC streams, and why a session ends |
//! | [`access`] | who may do what: rules, tokens, certificates, budgets |
//! | `engine`, `config`, `admission` | what a relay is started with: [`Engine`], [`Config`], [`Admission`] |
//!
//! Below this crate, `millrace-transport` has the QUIC connections and sends the packets, and `millrace-quic` and `millrace-moq` have
//! the messages, the cache and the decisions that need neither sockets nor a clock.
//!
//! # The life of an object
//!
//! 1. A publisher announces a namespace or a track. `session::namespaces` or `session::publish` registers it with the
//!    `hub`.
//! 2. A subscriber asks for a track. `session::subscribe` has the `hub` find it, and subscribe at its publishers if
//!    nobody has yet. The hub asks them through a trait, `hub::Publisher`: it knows no sessions.
//! 3. The object arrives on a stream. `session::streams` looks up the track alias, reads the stream piece by piece
//!    into the cache, and tells the `live` track of each piece. Nothing waits for an object to be complete.
//! 4. The track offers the piece to each `subscription`. That opens a stream on its own connection, or continues one;
//!    the stream reads from the cache, so that there is one copy for all subscribers.
//! 5. The connections put what they may send now into the `outbox`, which hands it to the network, one batch for each
//!    socket.
//! 6. The object is in the cache until it is too old or room is needed. Until then FETCH (`session::fetch`) and
//!    later subscribers get it from there.
//!
//! With engine `kernel`, streams of step 4 are delegated to the kernel, which sends most packets on its own. Userspace
//! still sees every object, and sends what the kernel could not.
//!
//! # Which way the arrows point
//!
//! ```text
//! server -> report -> session -> hub -> live -> subscription -> outbox
//!        -> trace  -> hub        |       |---> upstream
//!                                `-> wire
//! ```
//!
//! What stands on the left knows what stands on the right, never the other way. Within `session`, each family of
//! requests knows the context, and few know another family; only `requests` and the session itself know all.
//!
//! What a session starts ends with it: its tasks are in a set of its own, and what it has registered with the hub or
//! with a track is removed by the drop of a guard.
//!
//! # Example
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//!
//! use millrace_moq::{Draft, tracks::cache};
//! use millrace_relay::{Adaptive, Bound, Config, Delays, Engine, Open, Origins};
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
//!         upstream: None,
//!         transport,
//!         cache: cache::Limits { bytes: 64 << 20, age: Duration::from_secs(30) },
//!         max_sessions: 1000,
//!         max_tracks: 1000,
//!         linger: Duration::from_secs(5),
//!         drain_timeout: Duration::from_secs(5),
//!         goaway_uri: None,
//!         delays: Delays { default: Some(Duration::from_millis(250)), ..Delays::default() },
//!         origins: Origins::Any,
//!         adaptive: Adaptive::Off,
//!         switching_sets: false,
//!         drafts: Draft::ALL.to_vec(),
//!     };
//!     let engine = Arc::new(Engine::user("as configured"));
//!     let relay = Bound::new(config, Vec::new(), engine)?.serve(Arc::new(Open));
//!     println!("moqt://{} is served by engine {}", relay.local_addrs()[0], relay.status().engine.name);
//!     relay.drain().await;
//!     Ok(())
//! }
//! ```

pub mod access;
mod admission;
mod catalog;
mod config;
mod delays;
mod engine;
mod hub;
mod incomplete;
mod ladders;
mod live;
mod outbox;
mod reconnect;
mod report;
mod server;
mod session;
pub mod status;
mod subscription;
pub mod trace;
mod upstream;
mod waiters;
mod wire;

pub use admission::{Admission, Crowded, Open, Permit};
pub use config::{Config, Origins, Upstream, has_user, is_of_a_relay};
pub use delays::{DelayRule, Delays};
pub use engine::Engine;
pub use ladders::{Adaptive, LadderRule};
pub use millrace_logging::LogLimit;
pub use server::{Bound, Server, outgoing_sockets};
