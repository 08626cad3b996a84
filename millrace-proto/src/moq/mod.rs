//! MoQ Transport, draft-18, on the wire: control messages, stream headers, objects, datagrams.
