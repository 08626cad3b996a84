//! Congestion controls from object files.

use millrace_graft_kernel::{Control, Error, Object, SHIPPED, remove_leftovers};

use crate::site::{Site, available, congestion_of, set_congestion, transfer};

fn image(name: &str) -> &'static [u8] {
    SHIPPED.iter().find(|(known, _)| *known == name).expect("a graft").1
}

fn is_available(name: &str) -> bool {
    available().iter().any(|known| known == name)
}

#[test]
fn each_carries_a_transfer_and_is_gone_when_dropped() {
    let Some(site) = Site::new("carry") else { return };
    let listener = site.listen();
    for (name, image) in SHIPPED {
        let control = Control::register(image, &[]).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(control.name(), format!("mr_{name}"));
        println!("{name}: {:?}, by link: {}", control.timing(), control.is_by_link());
        let (client, server) = site.connect(&listener);
        set_congestion(&client, control.name()).expect(name);
        assert_eq!(congestion_of(&client), control.name());
        transfer(client, server, 4 << 20);
        let (client, server) = site.connect(&listener);
        set_congestion(&client, control.name()).expect(name);
        let name = control.name().to_owned();
        drop(control);
        assert!(!is_available(&name), "{name}");
        // A socket that has it goes on with it.
        assert_eq!(congestion_of(&client), name);
        transfer(client, server, 1 << 20);
    }
}

#[test]
fn is_replaced_under_its_name_while_sockets_use_it() {
    let Some(site) = Site::new("replace") else { return };
    let listener = site.listen();
    for by_link in [true, false] {
        let register = if by_link { Control::register } else { Control::register_without_link };
        let mut control = register(image("hybla"), &[]).expect("registered");
        if by_link && !control.is_by_link() {
            println!("SKIP is_replaced_under_its_name_while_sockets_use_it by link: this kernel has none");
            continue;
        }
        let (client, server) = site.connect(&listener);
        set_congestion(&client, "mr_hybla").expect("set");
        let refused = control.replace(image("westwood"), &[]).expect_err("another name");
        assert!(matches!(refused, Error::OtherName(..)), "{refused}");
        control.replace(image("hybla"), &[("rtt0_us".into(), 30_000)]).expect("replaced");
        assert!(is_available("mr_hybla"));
        let (next, other) = site.connect(&listener);
        set_congestion(&next, "mr_hybla").expect("set");
        transfer(client, server, 1 << 20);
        transfer(next, other, 1 << 20);
        drop(control);
        assert!(!is_available("mr_hybla"), "by link: {by_link}");
    }
}

/// What makes deploying a matter of milliseconds: libbpf is not asked again, and the verifier walks over each instruction about
/// once. It would walk over 44,000 of `pcc` if its functions were static.
#[test]
fn a_known_one_is_looked_at_about_once() {
    let Some(_site) = Site::new("known") else { return };
    for (name, image) in SHIPPED {
        Control::prepare(image).expect(name);
        let control = Control::register(image, &[]).expect(name);
        if !control.is_by_link() {
            println!("SKIP a_known_one_is_looked_at_about_once: this kernel registers none by link");
            return;
        }
        let verification = control.timing().verification.expect("it was relocated before");
        println!("{name}: {verification:?}");
        assert!((50..2000).contains(&verification.instructions), "{name}: {verification:?}");
    }
}

#[test]
fn a_name_is_registered_once() {
    let Some(_site) = Site::new("once") else { return };
    let _first = Control::register(image("hybla"), &[]).expect("registered");
    let second = Control::register(image("hybla"), &[]).err().expect("a name is there once");
    assert!(second.to_string().contains("another one of that name is there"), "{second}");
}

#[test]
fn what_a_killed_process_left_is_removed() {
    let Some(_site) = Site::new("leftover") else { return };
    // As a process leaves it on a kernel without links: registered, and nobody takes it back.
    std::mem::forget(Control::register_without_link(image("westwood"), &[]).expect("registered"));
    assert!(is_available("mr_westwood"));
    assert_eq!(remove_leftovers().expect("removed"), 1);
    assert!(!is_available("mr_westwood"));
    assert_eq!(remove_leftovers().expect("nothing"), 0);
}

#[test]
fn parameters_are_the_members_of_config() {
    let mut object = Object::open(image("hybla")).expect("an object");
    let known: Vec<_> =
        object.parameters().iter().map(|parameter| (parameter.name.as_str(), parameter.default)).collect();
    assert_eq!(known, [("rtt0_us", 35_000), ("slow_start_rho_max", 4), ("rho_max", 32), ("pace", 1)]);
    object.set("rtt0_us", u64::from(u32::MAX)).expect("it fits");
    let error = object.set("rtt0_us", 1 << 32).expect_err("it does not fit");
    assert_eq!(error.to_string(), "parameter rtt0_us: 4294967296 does not fit its 4 bytes");
    assert_eq!(object.set("none", 1).expect_err("none").to_string(), "it has no parameter none");
}

#[test]
fn what_is_no_congestion_control_is_refused() {
    let hybla = image("hybla");
    // The name in the object's data, and a letter that names do not have.
    let at = hybla.windows(9).position(|bytes| bytes == b"mr_hybla\0").expect("its name");
    let renamed = |name: &[u8; 8]| {
        let mut image = hybla.to_vec();
        // All of them: in the data and among the symbols.
        let places: Vec<_> = (0..image.len() - 8).filter(|at| &image[*at..*at + 8] == b"mr_hybla").collect();
        assert!(places.contains(&at));
        places.iter().for_each(|at| image[*at..*at + 8].copy_from_slice(name));
        image
    };
    let table: [(&str, Vec<u8>, &str); 5] = [
        ("nothing", Vec::new(), "it is not an object file of BPF programs"),
        ("text", b"hello".to_vec(), "it is not an object file of BPF programs"),
        ("half", hybla[..hybla.len() / 2].to_vec(), "it is not an object file of BPF programs"),
        ("another name", renamed(b"my_hybla"), "it is to be mr_ and letters"),
        ("odd letters", renamed(b"mr_hy la"), "it is to be mr_ and letters"),
    ];
    for (what, image, wanted) in table {
        let error = Object::open(&image).err().expect(what).to_string();
        assert!(error.contains(wanted), "{what}: {error}");
    }
}
