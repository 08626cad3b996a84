//! Tests that load congestion controls from object files and replace them.

use millrace_graft_kernel::{
    CongestionProgram, Error, GraftObject, SHIPPED, ShippedObject, remove_leftovers,
};

use crate::site::{GraftTestSite, available, congestion_of, set_congestion, transfer};

fn image(name: &str) -> &'static [u8] {
    SHIPPED.iter().find(|it| it.name == name).expect("a graft").image
}

fn is_available(name: &str) -> bool {
    available().iter().any(|known| known == name)
}

#[test]
fn each_congestion_control_transfers_and_is_removed_when_dropped() {
    let Some(site) = GraftTestSite::new("carry") else { return };
    let listener = site.listen();
    for &ShippedObject { name, image, .. } in SHIPPED {
        let control =
            CongestionProgram::register(image, &[]).unwrap_or_else(|error| panic!("{name}: {error}"));
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
        // A socket keeps the congestion control that was removed, since it holds a reference.
        assert_eq!(congestion_of(&client), name);
        transfer(client, server, 1 << 20);
    }
}

#[test]
fn congestion_control_is_replaced_while_sockets_use_it() {
    let Some(site) = GraftTestSite::new("replace") else { return };
    let listener = site.listen();
    for by_link in [true, false] {
        let register =
            if by_link { CongestionProgram::register } else { CongestionProgram::register_without_link };
        let mut control = register(image("longhaul"), &[]).expect("registered");
        if by_link && !control.is_by_link() {
            println!(
                "SKIP congestion_control_is_replaced_while_sockets_use_it by link: this kernel has none"
            );
            continue;
        }
        let (client, server) = site.connect(&listener);
        set_congestion(&client, "mr_longhaul").expect("set");
        let refused = control.replace(image("pcc"), &[]).expect_err("another name");
        assert!(matches!(refused, Error::OtherName(..)), "{refused}");
        control.replace(image("longhaul"), &[("loss_permille".into(), 30)]).expect("replaced");
        assert!(is_available("mr_longhaul"));
        let (next, other) = site.connect(&listener);
        set_congestion(&next, "mr_longhaul").expect("set");
        transfer(client, server, 1 << 20);
        transfer(next, other, 1 << 20);
        drop(control);
        assert!(!is_available("mr_longhaul"), "by link: {by_link}");
    }
}

/// If a congestion control's object was loaded before, libbpf does not relocate it again. The verifier processes each
/// instruction about once, because functions are global. With static functions it would process 44,000 instructions for
/// the congestion control `pcc`.
#[test]
fn reloaded_congestion_control_needs_at_most_2000_verifier_instructions() {
    let Some(_site) = GraftTestSite::new("known") else { return };
    for &ShippedObject { name, image, .. } in SHIPPED {
        CongestionProgram::prepare(image).expect(name);
        let control = CongestionProgram::register(image, &[]).expect(name);
        if !control.is_by_link() {
            println!(
                "SKIP reloaded_congestion_control_needs_at_most_2000_verifier_instructions: this kernel registers none by link"
            );
            return;
        }
        let verification = control.timing().verification.expect("it was relocated before");
        println!("{name}: {verification:?}");
        assert!((50..2000).contains(&verification.instructions), "{name}: {verification:?}");
    }
}

#[test]
fn second_congestion_control_of_the_same_name_is_refused() {
    let Some(_site) = GraftTestSite::new("once") else { return };
    let _first = CongestionProgram::register(image("longhaul"), &[]).expect("registered");
    let second = CongestionProgram::register(image("longhaul"), &[]).err().expect("a name is there once");
    assert!(second.to_string().contains("a control of that name is registered already"), "{second}");
}

#[test]
fn congestion_control_left_by_a_killed_process_is_removed() {
    let Some(_site) = GraftTestSite::new("leftover") else { return };
    // This is what a killed process leaves on kernels without links: a registered control and its map.
    std::mem::forget(CongestionProgram::register_without_link(image("pcc"), &[]).expect("registered"));
    assert!(is_available("mr_pcc"));
    assert_eq!(remove_leftovers().expect("removed"), 1);
    assert!(!is_available("mr_pcc"));
    assert_eq!(remove_leftovers().expect("nothing"), 0);
}

#[test]
fn graft_parameters_are_the_members_of_its_config() {
    let mut object = GraftObject::open(image("longhaul")).expect("an object");
    let known: Vec<_> =
        object.parameters().iter().map(|parameter| (parameter.name.as_str(), parameter.default)).collect();
    assert_eq!(
        known,
        [("loss_permille", 150), ("cwnd_percent", 185), ("back_off_percent", 85), ("rtt_window_ms", 10_000)]
    );
    object.set("loss_permille", u64::from(u32::MAX)).expect("it fits");
    let error = object.set("loss_permille", 1 << 32).expect_err("it does not fit");
    assert_eq!(error.to_string(), "parameter loss_permille: 4294967296 does not fit its 4 bytes");
    assert_eq!(object.set("none", 1).expect_err("none").to_string(), "the graft has no parameter none");
}

#[test]
fn object_without_congestion_control_is_refused() {
    let longhaul = image("longhaul");
    // Offset of the congestion control's name in the object file. The last name tried below has a letter that is not
    // allowed in names of congestion controls.
    let at = longhaul.windows(12).position(|bytes| bytes == b"mr_longhaul\0").expect("its name");
    let renamed = |name: &[u8; 11]| {
        let mut image = longhaul.to_vec();
        // The new name replaces the old one everywhere in the object file: in the data and in the symbol table.
        let places: Vec<_> =
            (0..image.len() - 11).filter(|at| &image[*at..*at + 11] == b"mr_longhaul").collect();
        assert!(places.contains(&at));
        places.iter().for_each(|at| image[*at..*at + 11].copy_from_slice(name));
        image
    };
    let table: [(&str, Vec<u8>, &str); 5] = [
        ("nothing", Vec::new(), "this is not an object file of BPF programs"),
        ("text", b"hello".to_vec(), "this is not an object file of BPF programs"),
        ("half", longhaul[..longhaul.len() / 2].to_vec(), "this is not an object file of BPF programs"),
        ("another name", renamed(b"my_longhaul"), "the name has to be mr_ and letters"),
        ("odd letters", renamed(b"mr_long aul"), "the name has to be mr_ and letters"),
    ];
    for (what, image, wanted) in table {
        let error = GraftObject::open(&image).err().expect(what).to_string();
        assert!(error.contains(wanted), "{what}: {error}");
    }
}
