//! Kernel edge.
