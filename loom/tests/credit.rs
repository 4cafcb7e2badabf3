//! Every order in which two threads can share credit.

use kvbroker_loom as models;
use models::{as_it_is, relaxed};

#[test]
fn of_two_threads_that_take_the_last_block_one_gets_it() {
    models::two_threads_and_one_block::<as_it_is::Credits>();
}

#[test]
fn two_threads_never_get_the_same_block_and_neither_goes_without() {
    models::two_threads_and_two_blocks::<as_it_is::Credits>();
}

#[test]
fn whoever_takes_a_block_sees_the_life_that_its_giver_wrote() {
    models::blocks_go_from_hand_to_hand::<as_it_is::Credits>();
}

#[test]
fn a_block_is_given_with_everything_that_was_written_before() {
    models::what_is_given_comes_with_its_bytes::<as_it_is::Credits>();
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_acquire_and_release_the_models_find_a_race() {
    models::what_is_given_comes_with_its_bytes::<relaxed::Credits>();
}
