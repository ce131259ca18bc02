"""A loss that pulls a policy to a teacher."""
