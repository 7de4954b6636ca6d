"""What optimizers share: anchors, penalties in the step, backends."""
