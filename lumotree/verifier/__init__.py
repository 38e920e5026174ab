"""Path-parallel verification and publication in torch: one shared recurrent step, conv and tree attention."""
