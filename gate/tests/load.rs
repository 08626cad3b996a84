//! Loads every BPF object of this crate into the running kernel, with its compiled-in configuration. Needs root.

const OBJECTS: &[(&str, &[u8])] = &include!(concat!(env!("OUT_DIR"), "/objects.rs"));

#[test]
fn every_bpf_object_loads() {
    millrace_kernel::testing::load_objects(OBJECTS);
}
