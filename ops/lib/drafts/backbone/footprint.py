from ops.lib.drafts.backbone.sizes import MASTER, draft_parameters  # noqa: F401
