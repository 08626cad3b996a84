//! Tests of grafts over real TCP between two namespaces: congestion controls from object files, agreement in TCP
//! options, and existing sockets. They need root and cgroup version 2.

mod agreement;
mod beside;
mod control;
mod site;
mod sockets;

use millrace_testkit::net;
