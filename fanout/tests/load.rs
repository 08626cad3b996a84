//! Checks that every object of this crate loads into the running kernel, with the configuration that it is compiled
//! with. Needs root.

const OBJECTS: &[(&str, &[u8])] = &include!(concat!(env!("OUT_DIR"), "/objects.rs"));

#[test]
fn every_bpf_object_loads() {
    millrace_kernel::testing::load_objects(OBJECTS);
}
