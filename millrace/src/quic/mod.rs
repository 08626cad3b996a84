//! QUIC at the edge: the seam around rustls, endpoint and connections.
