//! Engines: how sealed packets reach the network.
