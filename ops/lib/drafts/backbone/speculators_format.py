from ops.lib.drafts.backbone.speculators import FOLDER, unwritable  # noqa: F401
