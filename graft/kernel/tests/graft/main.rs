//! Grafts over real TCP between two namespaces: congestion controls from object files, agreement in options, and sockets
//! that live. Needs root and cgroup version 2.

mod agreement;
mod beside;
mod control;
mod site;
mod sockets;

use millrace_testkit::net;
